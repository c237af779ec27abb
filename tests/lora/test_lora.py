"""LoRA against PEFT on tiny transformers models: the same numbers, the same files, and what each
refuses."""

import copy
import json
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as PeftLinear
from safetensors.torch import load_file, save_file
from torch import nn

from lora import adapter
from lora.adapter import (
    DECODER_TARGETS,
    LoRALinear,
    disabled,
    fingerprint,
    inject,
    load,
    lora_layers,
    merge,
    save,
)
from model import cpu
from model.differential import KINDS, graft, new_parameters
from tests.files import json_lines, read_json, write_json
from tests.reference import (
    batch,
    dice,
    generations,
    hf_forward,
    hf_language,
    hf_model,
    is_valid,
    ours,
    relative_error,
)
from tests.runs import assert_same_tensors, refused
from train.optim import trainable

EXACT = 1e-6
# fp32 rounding of weights or updates by themselves, amplified by the reference's sharp attention
ROUNDED = 2e-5
SENSITIVE = 4  # times `sensitivity`: the largest ratio found is 0.8
SEVEN = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
DECODER_LAYER = "language_model.layers.0."


def randomize(model, seed=0, std=0.2):
    """Give every parameter of the adapter a value that matters: B starts at zero, where half of the
    mistakes hide."""
    generator = dice(seed)
    with torch.no_grad():
        for parameter in adapter.adapter_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def peft_adapter(hf, folder, **config):
    """A PEFT model around a copy of `hf`, with random A and B, and its files in `folder`."""
    torch.manual_seed(3)
    config = {"r": 4, "lora_alpha": 6, "init_lora_weights": False} | config
    model = peft.get_peft_model(copy.deepcopy(hf), peft.LoraConfig(**config)).eval()
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return model


def wrapped(theirs):
    """The paths that carry PEFT's LoRA."""
    modules = theirs.base_model.model.named_modules()
    return sorted(path for path, module in modules if isinstance(module, PeftLinear))


def valid(logits, inputs):
    return logits[is_valid(inputs)]


def of_peft(model, inputs):
    return valid(hf_forward(model.base_model.model, inputs), inputs)


def loss(logits, inputs):
    return F.cross_entropy(logits.float(), valid(inputs["input_ids"], inputs))


def peft_gradients(theirs, inputs):
    """PEFT's valid logits, and the gradients of its adapter by their names in the file."""
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_("lora_" in name)
        parameter.grad = None
    logits = of_peft(theirs, inputs)
    loss(logits, inputs).backward()
    gradients = {
        name.replace(".default.", "."): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    return logits.detach(), gradients


def sensitivity(theirs, inputs, logits, gradients):
    """How far the reference moves when each of its weights moves by at most one unit in the last
    place.

    No computation in fp32 can be expected to be nearer, on any processor and with any number of
    threads.
    """
    of_all = []
    by_name = {name: [] for name in gradients}
    for seed in range(3):
        moved = copy.deepcopy(theirs)
        generator = dice(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                drawn = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + drawn * 2**-23)
        of_logits, of_gradients = peft_gradients(moved, inputs)
        of_all.append(relative_error(of_logits, logits))
        for name, gradient in gradients.items():
            by_name[name].append(relative_error(of_gradients[name], gradient))
    return max(of_all), {name: max(errors) for name, errors in by_name.items()}


@pytest.fixture(scope="module")
def hf():
    return hf_model(1)


@pytest.fixture(scope="module")
def inputs(hf):
    return batch(hf)


@pytest.fixture(autouse=True)
def same_draws_in_any_order(hf, seeded):
    """The matrix A is drawn by PyTorch's generator."""


@pytest.fixture
def model(hf):
    return ours(hf)


# PEFT scales an update behind B, we between A and B: the same to the bit where alpha / r is a power
# of two
PEFT_CONFIGS = json.loads(
    r"""{
    "the paper's scale": {"target_modules": SEVEN, "lora_alpha": 8},
    "list of endings, which reaches both towers": {"target_modules": ["q_proj", "v_proj", "fc1"]},
    "regular expression": {"target_modules": ".*language_model.*\\.(self_attn|mlp)\\.\\w+_proj"},
    "whole paths": {"target_modules": ["model.language_model.layers.0.mlp.up_proj",
        "model.multi_modal_projector.linear"]},
    "ranks and alphas by pattern": {"target_modules": SEVEN,
        "rank_pattern": {"layers\\.0\\.self_attn\\.q_proj": 7, "down_proj": 2},
        "alpha_pattern": {"layers": 90, "^model\\.language_model\\..*k_proj": 11, "q_pro": 80,
            "gate_proj": 1}},
    "rank-stabilised": {"target_modules": ["o_proj", "q_proj"], "use_rslora": true,
        "rank_pattern": {"o_proj": 9}},
    "excluded": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ".*vision_tower.*"},
    "chosen layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}
}""".replace("SEVEN", json.dumps(SEVEN))
)


@pytest.mark.long
@generations
@pytest.mark.parametrize("name", PEFT_CONFIGS)
def test_what_peft_saved_computes_the_same_here(tmp_path, generation, name):
    """Breaks when a key, rank or scale of PEFT's files is read otherwise, or forward, backward or
    merge differ."""
    hf = hf_model(generation)
    inputs = batch(hf)
    theirs = peft_adapter(hf, tmp_path, **PEFT_CONFIGS[name])
    mine = ours(hf)
    assert sorted(f"model.{path}" for path in load(mine, tmp_path)) == wrapped(theirs)
    with cpu.using("torch"):  # the functions that transformers calls
        logits = valid(mine(**inputs), inputs)
        (reference, gradients) = peft_gradients(theirs, inputs)
    assert relative_error(reference, valid(hf_forward(hf, inputs), inputs)) > 1e-2
    of_logits, of_gradients = sensitivity(theirs, inputs, reference, gradients)
    bound = EXACT if name == "the paper's scale" else SENSITIVE * of_logits
    assert relative_error(logits, reference) <= bound <= 1e-4
    loss(valid(mine(**inputs), inputs), inputs).backward()
    parameters = adapter.adapter_parameters(mine)
    assert parameters.keys() == gradients.keys()
    for key, parameter in parameters.items():
        off = relative_error(parameter.grad, gradients[key])
        assert off <= SENSITIVE * of_gradients[key] <= 1e-3, key
    merge(mine)
    merged = theirs.merge_and_unload().state_dict()
    for path, layer in lora_layers(mine).items():
        assert relative_error(layer.base_layer.weight, merged[f"model.{path}.weight"]) <= 1e-7, path


@pytest.mark.long
@generations
def test_what_is_saved_here_computes_the_same_in_peft(tmp_path, generation):
    """Breaks when PEFT cannot read our files, warns about them, or puts LoRA on other layers than
    ours."""
    hf = hf_model(generation)
    inputs = batch(hf)
    mine = ours(hf)
    inject(mine, DECODER_TARGETS, r=4, alpha=8, dropout=0.1)
    inject(mine, r"vision_tower\..*\.1\..*\.q_proj", r=2, alpha=3.5, dropout=0.1)
    save(randomize(mine), tmp_path, base="google/paligemma-3b-pt-224")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(hf), str(tmp_path)).eval()
    assert sorted(f"model.{path}" for path in lora_layers(mine)) == wrapped(theirs)
    assert relative_error(valid(mine(**inputs), inputs), of_peft(theirs, inputs)) <= ROUNDED
    config = theirs.peft_config["default"]
    assert config.base_model_name_or_path == "google/paligemma-3b-pt-224"
    assert config.lora_dropout == 0.1


@pytest.mark.parametrize("kind", "gemma gemma2 llama qwen2".split())
@torch.no_grad()
def test_a_language_models_adapter_goes_both_ways(tmp_path, kind):
    """Breaks when a layer of a language model has another path than in transformers' own, or an
    adapter of this project's earlier names is not opened."""
    theirs = hf_language(kind)
    ids = torch.randint(3, 128, (2, 9))
    targets = [*SEVEN, "lm_head"] if kind == "llama" else SEVEN
    patterns = {"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 7}}
    of_peft = peft_adapter(theirs, tmp_path / "peft", target_modules=targets, **patterns)
    mine = ours(theirs)
    base = mine(ids)
    load(mine, tmp_path / "peft")
    logits = of_peft(ids).logits
    assert relative_error(logits, base) > 1e-2
    assert relative_error(mine(ids), logits) <= ROUNDED

    save(mine, tmp_path / "ours")
    reopened = peft.PeftModel.from_pretrained(copy.deepcopy(theirs), str(tmp_path / "ours"))
    assert relative_error(reopened(ids).logits, mine(ids)) <= ROUNDED
    saved = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert saved.keys() == load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()

    mine.published = {"": "model."}  # the names of earlier files
    save(mine, tmp_path / "before")
    again = ours(theirs)
    assert load(again, tmp_path / "before") == list(lora_layers(mine))
    assert torch.equal(again(ids), mine(ids))


BEFORE_4_52 = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.vision_model.",
}
BEFORE_5 = {"model.vision_tower.": "model.vision_tower.vision_model."}


@pytest.mark.parametrize("rename", [BEFORE_4_52, BEFORE_5])
def test_files_of_older_transformers(tmp_path, hf, inputs, model, rename):
    """Breaks when an adapter that an older transformers' module paths name is not understood, or
    one of two updates of a layer is taken in silence."""
    theirs = peft_adapter(
        hf, tmp_path, target_modules=["q_proj", "fc2"], alpha_pattern={r"0\.self_attn\.q_proj": 9}
    )
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    older = tensors
    for new, old in rename.items():
        older = {
            name.replace(f".model.{new}", f".model.{old}", 1): tensor.clone()
            for name, tensor in older.items()
        }
    save_file(tensors | older, file)
    refused(lambda: load(copy.deepcopy(model), tmp_path), "twice", ".lora_A")
    save_file(older, file)
    load(model, tmp_path)
    assert relative_error(valid(model(**inputs), inputs), of_peft(theirs, inputs)) <= ROUNDED


def test_one_layer_is_pefts_with_dropout_too():
    """Breaks when the draw of A, the scale, or the place of dropout (x of the update, never the
    base) differs."""
    base = nn.Linear(24, 40)
    x = torch.randn(3, 5, 24)
    outputs = []
    config = peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=0.5)
    for make in (
        lambda: LoRALinear(base, r=4, alpha=6, dropout=0.5),
        lambda: PeftLinear(base, "default", config=config, r=4, lora_alpha=6),
    ):
        torch.manual_seed(0)
        layer = make().train()
        assert torch.equal(layer(x), base(x)), "B is zero, and dropout does not touch the base"
        a, b = (parameter for name, parameter in layer.named_parameters() if "lora_" in name)
        b.data.normal_()
        outputs.append([a, b, layer(x), layer(x), layer.eval()(x)])
    mine, theirs = outputs
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert not torch.equal(theirs[2], theirs[3])
    for y, expected in zip(mine[2:], theirs[2:], strict=True):
        assert relative_error(y, expected) <= EXACT


def test_targets_are_matched_as_in_peft(model):
    """Breaks when targets are matched otherwise than PEFT does: endings at dots, or a regex over
    the whole path."""
    decoder = [f"language_model.layers.{n}.self_attn.q_proj" for n in range(3)]
    tower = "vision_tower.encoder.layers.1.self_attn.q_proj"
    in_decoder = [p for p in adapter.free_layers(model) if p.startswith("language_model.layers.")]
    seven = [path for path in in_decoder if path.split(".")[-1] in SEVEN]
    for targets, paths in (
        (r"model\.language_model\..*\.q_proj", decoder),
        (["layers.1.self_attn.q_proj", "model." + decoder[0]], [*decoder[:2], tower]),
        (DECODER_TARGETS, seven),
    ):
        assert sorted(inject(copy.deepcopy(model), targets, 2, 4)) == sorted(paths)
    for targets, r, says in (
        (["embed_tokens"], 2, "match no free"),
        ("(", 2, "expression"),
        (["q_proj"], 0, "r 0"),
        (r".*\.layers\.\d+\.self", 2, "match no free"),  # a beginning
    ):
        refused(lambda targets=targets, r=r: inject(model, targets, r, 4), says)
    refused(lambda: inject(model, ["q_proj"], 2, 0), "alpha 0")
    inject(model, DECODER_TARGETS, 2, 4)
    # neither a base nor LoRA's own
    refused(lambda: inject(model, r"language_model\..*", 2, 4), "match no free")


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merge_and_unmerge(hf, inputs, dtype):
    """Breaks when a merge is not the sum rounded once, is applied twice, or cannot be taken back to
    the bit."""
    model = ours(hf, dtype=dtype)
    inject(model, SEVEN, r=4, alpha=6)
    randomize(model)

    def state():
        return copy.deepcopy(model.state_dict())

    before = state()
    logits = model(**inputs)
    merge(model)
    once = state()
    merge(model)
    assert_same_tensors(state(), once)
    expected = before | {name: once[name] for name in once if name.endswith("base_layer.weight")}
    assert_same_tensors(once, expected)
    for path, layer in lora_layers(model).items():
        delta = 6 / 4 * layer.lora.lora_B.weight.double() @ layer.lora.lora_A.weight.double()
        exact = before[f"{path}.base_layer.weight"].double() + delta
        # half a unit in the last place, plus what the product in fp32 leaves: rounding twice would
        # exceed it
        bound = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * delta.abs().max()
        assert ((layer.base_layer.weight.double() - exact).abs() <= bound).all(), path
    if dtype != torch.bfloat16:  # whose rounding this model's sharp attention blows up
        assert relative_error(valid(model(**inputs), inputs), valid(logits, inputs)) <= ROUNDED
    for _ in range(2):
        adapter.unmerge(model)
        assert_same_tensors(state(), before)
    assert torch.equal(model(**inputs), logits)
    merge(model)
    adapter.unmerge(model.to(torch.float16))  # the kept weights are of the dtype before
    assert_same_tensors(state(), {name: tensor.half() for name, tensor in before.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_merge_of_grafts(inputs, model, kind):
    """Breaks when a merge moves the second branch of the attention too, or one that keeps the
    function is refused."""
    graft(model, kind)
    shared = KINDS[kind].read_twice
    inject(model, [name for name in SEVEN if name not in shared], 2, 4)
    logits = randomize(model)(**inputs)
    apart = copy.deepcopy(model)
    merge(model)
    assert all(layer.merged for layer in lora_layers(model).values())
    assert relative_error(valid(model(**inputs), inputs), valid(logits, inputs)) <= ROUNDED
    for name in shared:
        other = copy.deepcopy(apart)
        inject(other, [name], 2, 4)
        refused(lambda other=other: merge(other), f"self_attn.{name}", kind)
        assert not any(layer.merged for layer in lora_layers(other).values())


@pytest.mark.parametrize("kind", [None, "twin"])
@torch.no_grad()  # with gradients PyTorch computes by other kernels
def test_disabled(kind, inputs, model):
    """Breaks when a fresh adapter moves the model, an update is added in the block or missing after
    it, or a layer that is taken off leaves anything."""
    base = model(**inputs)
    names = list(model.state_dict())
    if kind:
        graft(model, kind)
    inject(model, ["v_proj", "o_proj"] if kind else SEVEN, 4, 8, dropout=0.5)
    assert torch.equal(model(**inputs), base)
    assert not any(module.training for module in model.modules())
    for change in (randomize, merge):
        change(model)
        logits = model(**inputs)
        assert relative_error(logits, base) > 1e-2
        with pytest.raises(KeyError), disabled(model):
            with disabled(model):
                assert torch.equal(model(**inputs), base)
            assert torch.equal(model(**inputs), base)
            raise KeyError
        assert torch.equal(model(**inputs), logits)
    if kind:
        refused(lambda: adapter.unload(model), "graft")
    else:
        adapter.unload(model)
        assert list(model.state_dict()) == names
        assert torch.equal(model(**inputs), base)


# arguments of `graft`; none: LoRA alone
GRAFTS = """{}
{"attention": "split", "rope_pairs": "fresh", "norm": false}
{"attention": "dex", "heads": [1, 3], "feed_forward": "swiglu-new"}
{"attention": "shared", "diff_in": "both", "lambda_init": 0.3}
{"attention": "v2"}
{"attention": "difflora", "alone": true, "norm": true}
{"attention": "sink", "start": -1.0}
{"attention": "mean"}
{"attention": "gate"}
{"attention": "temperature"}
{"attention": "twin", "diff_in": "vision", "r": 3, "alpha": 5.0}"""


@pytest.mark.long
@pytest.mark.parametrize("options", json_lines(GRAFTS))
def test_saved_and_loaded_here_is_the_same_to_the_bit(tmp_path, hf, inputs, model, options):
    """Breaks when a rank, an alpha, the dropout, or a variant's options or parameters are lost in
    the files."""
    if options:
        graft(model, **options)
    if options.get("diff_in") == "vision":  # a second call, in another order
        graft(model, "dex", diff_in="decoder")
    inject(model, ["q_proj", "o_proj", "fc1"], r=3, alpha=10, dropout=0.25)
    inject(model, ["v_proj"], r=5, alpha=1, dropout=0.25)
    inject(model, ["k_proj", "fc2"], r=2, alpha=90, dropout=0.25)
    randomize(model)
    file = tmp_path / "adapter_model.safetensors"
    saved = set()
    for _ in range(9):  # of several entries of metadata the order would be random
        save(model, tmp_path)
        saved.add(file.read_bytes())
    assert len(saved) == 1
    extra = {name for name in load_file(file) if not name.startswith("base_model.model.")}
    assert extra == {f"differential.{name}" for name in new_parameters(model)}
    if extra:  # which PEFT would leave out; before, such a file said LORA
        with pytest.raises(KeyError, match="DIFFERENTIAL_LORA"):
            peft.PeftModel.from_pretrained(copy.deepcopy(hf), str(tmp_path))
        config = read_json(tmp_path / "adapter_config.json")
        write_json(tmp_path / "adapter_config.json", config | {"peft_type": "LORA"})
        assert {"kind", "where"} < config["differential"][0].keys()  # as files written before
    again = ours(hf)
    assert load(again, tmp_path) == list(lora_layers(model))
    assert torch.equal(again(**inputs), model(**inputs))
    assert {layer.lora.dropout for layer in lora_layers(again).values()} == {0.25}
    assert again.grafts == model.grafts
    assert list(new_parameters(again)) == list(new_parameters(model))
    assert list(trainable(again)) == list(trainable(model))


@pytest.mark.long
def test_fingerprint_names_the_base_and_nothing_else(hf, model):
    """Breaks when an adapter, its merge, or bf16 makes a base look like another one, or another one
    looks the same."""
    mark = fingerprint(model)
    assert fingerprint(ours(hf, dtype=torch.bfloat16)) == mark
    inject(model, SEVEN, 2, 4)
    assert fingerprint(randomize(model)) == mark
    merge(model)
    assert fingerprint(model) == mark
    assert fingerprint(ours(hf_model(1, seed=1))) != mark
    for columns in (slice(None), slice(1, None)):  # of 64·72 values even steps see column 0
        trained = ours(hf)
        trained.get_submodule(DECODER_LAYER + "self_attn.q_proj").weight.data[:, columns] *= 1.01
        assert fingerprint(trained) != mark


def test_tensors_that_do_not_fit(tmp_path, hf, model):
    """Breaks when another base, or a missing, unexpected, misshaped or broken tensor is passed
    over."""
    graft(model, "twin")
    inject(model, DECODER_TARGETS, 2, 4)
    save(model, tmp_path, base="some/base")
    refused(lambda: load(ours(hf_model(1, seed=1)), tmp_path), "another base", "some/base")
    path = tmp_path / "adapter_model.safetensors"
    layer = f"{DECODER_LAYER}self_attn."
    a, b = (f"base_model.model.model.{layer}q_proj.lora_{half}.weight" for half in "AB")
    whole = load_file(path)
    for change, says in (
        ({a: None, b: None}, f"missing {a}"),
        ({"\x1b[31m": torch.zeros(1)}, r"unexpected \x1b[31m"),
        ({b: torch.zeros(3, 2)}, f"{b} is torch.float32 (3, 2), expected finite floats (64, 2)"),
        ({f"differential.{layer}mu": None}, f"missing differential.{layer}mu"),
        ({b: torch.full((64, 2), 1e300, dtype=torch.float64)}, f"{b} is torch.float64"),
    ):
        save_file({name: t for name, t in (whole | change).items() if t is not None}, path)
        refused(lambda: load(ours(hf), tmp_path, force=True), says)


PATTERNS = [
    "(a+)+$",
    "(.*.*)*x",
    "(q|q)*_proj",
    ".*.*.*.*_",
    "(a|a)" * 30,
    r"(a+)(?#)+",
    "a" * 9999,
]


@pytest.mark.parametrize("name", "target_modules exclude_modules layers_pattern rank".split())
def test_a_regular_expression_in_an_adapter_ends(tmp_path, hf, inputs, model, name):
    """Breaks when somebody's adapter takes hours to be opened, or what PEFT writes is refused."""
    theirs = peft_adapter(hf, tmp_path, target_modules=["q_proj"], rank_pattern={"q_proj": 4})
    file = tmp_path / "adapter_config.json"
    config = read_json(file)
    for pattern in PATTERNS:
        change = {"rank_pattern": {pattern: 4}} if name == "rank" else {name: pattern}
        write_json(file, config | change)
        if name == "rank":
            refused(lambda: load(copy.deepcopy(model), tmp_path), "rank_pattern", "hours")
        else:  # the tensors say which layers carry LoRA
            again = copy.deepcopy(model)
            load(again, tmp_path)
    if name != "rank":
        assert relative_error(valid(again(**inputs), inputs), of_peft(theirs, inputs)) <= ROUNDED


UNKNOWN = """{"use_dora": true}
{"bias": "lora_only"}
{"init_lora_weights": "olora"}
{"a_new_invention": 1}
{"revision": "step1000"}
{"r": 8}
{"lora_alpha": null}"""


def test_what_is_no_adapter(tmp_path, hf, model):
    """Breaks when a feature is dropped, a rank that PEFT refuses is taken, a pickle is opened, or
    weights that were trained too are left out of a file."""

    def load_copy():
        load(copy.deepcopy(model), tmp_path)

    refused(load_copy, "adapter_config.json: not found")
    peft_adapter(hf, tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_config.json"
    config = read_json(path)
    for change in json_lines(UNKNOWN):
        write_json(path, config | change)
        refused(load_copy, str(tmp_path))
    write_json(path, config | {"quantized": "fp3"})
    refused(load_copy, "fp3")
    write_json(path, config)
    write_json(path, {key: value for key, value in config.items() if key != "lora_alpha"})
    again = copy.deepcopy(model)
    load(again, tmp_path)
    assert {layer.alpha for layer in lora_layers(again).values()} == {8}  # PEFT's default
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    refused(load_copy, "adapter_model.safetensors: not found")
    refused(lambda: save(model, tmp_path), "no adapter to save")
    inject(model, ["q_proj"], 2, 4)
    refused(lambda: load(model, tmp_path), "has an adapter already")
    model.multi_modal_projector.requires_grad_(True)
    refused(lambda: save(model, tmp_path), "multi_modal_projector.linear.weight")


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_half_precision(base):
    """Breaks when autocast casts the adapter's parameters or gradients, or the adapter widens what
    the base returns."""
    layer = LoRALinear(nn.Linear(24, 40, dtype=base), r=4, alpha=8)
    layer.lora.lora_B.weight.data.normal_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(3, 24, dtype=base))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    for parameter in layer.lora.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.any()
