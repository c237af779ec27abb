"""Q-Mamba: its mask shares out the features, its parts equal other people's layers, and the whole
model answers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.mamba.modeling_mamba import MambaMixer as HFMambaMixer

from model.config import VisionConfig
from model.siglip import Siglip
from model.systems.configs import MambaConfig, ProjectorConfig, QMambaConfig
from model.systems.qmamba import (
    QMamba,
    QMambaProjector,
    fresh_projector,
    initialize_qmamba,
    local_mask,
)
from tests.reference import (
    backends,
    dice,
    left_padded,
    randomize,
    relative_error,
    set_attention_backend,
)
from train.optim import parameter_names

IMAGE = 59
VISION = VisionConfig(20, 28, 3, 2, image_size=60, feature_layer=-2)
PROJECTOR = ProjectorConfig(
    queries=5, hidden_size=24, num_blocks=2, num_attention_heads=4, state_size=6
)
TEXT = MambaConfig(
    vocab_size=59, hidden_size=28, num_hidden_layers=3, state_size=5, eos_token_id=1, bos_token_id=2
)
CONFIG = QMambaConfig(
    VISION, PROJECTOR, TEXT, IMAGE
)  # 16 features a picture, shared by 5 queries: 4, 3, 3, 3, 3


def randomized(module):
    """Every parameter with a value that matters."""
    torch.manual_seed(0)
    randomize(module)
    return module


def projector(**changes):
    return randomized(QMambaProjector(replace(CONFIG, projector=replace(PROJECTOR, **changes))))


FEATURES = torch.randn(2, 16, VISION.hidden_size, generator=dice(1))


@pytest.mark.parametrize(
    "queries, keys", [(1, 9), (3, 8), (16, 16), (256, 729), (512, 729), (729, 729)]
)
def test_the_mask_shares_out_the_keys(queries, keys):
    """Breaks when a key is seen twice or never, or spans are not contiguous, in order, and as equal
    as can be."""
    mask = local_mask(queries, keys)
    assert (mask.sum(0) == 1).all()
    assert (mask.long().argmax(0).diff() >= 0).all()
    least, longer = divmod(keys, queries)
    assert mask.sum(1).tolist() == [least + 1] * longer + [least] * (queries - longer)
    assert (QMambaConfig().num_image_tokens, QMambaConfig().vision.num_image_tokens) == (256, 729)
    assert ProjectorConfig().mixers == MambaConfig()  # the default projector takes mamba-130m


def by_other_hands(module, x):
    """The paper's equations in fp64, over transformers' mixer and torch's attention, filled with
    our weights."""
    config = module.config
    width = config.hidden_size
    heads = config.num_attention_heads
    sizes = transformers.MambaConfig(
        hidden_size=width, state_size=config.state_size, num_hidden_layers=1
    )

    def mamba(mixer, h):
        reference = HFMambaMixer(sizes, 0)
        reference.load_state_dict(mixer.state_dict())
        with pytest.MonkeyPatch.context() as patch:  # its fp32 islands, too, in fp64
            patch.setattr(Tensor, "float", Tensor.double)
            return reference.double().eval()(h)

    def attention(attn, q, kv):
        reference = torch.nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
        projections = (attn.q_proj, attn.k_proj, attn.v_proj)
        state = {"out_proj.weight": attn.out_proj.weight, "out_proj.bias": attn.out_proj.bias}
        for name in ("weight", "bias"):
            state[f"in_proj_{name}"] = torch.cat([p.get_parameter(name) for p in projections])
        reference.load_state_dict(state)
        hidden = None
        if config.local_attention:  # True hides, there
            owner = torch.tensor([0] * 4 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3)
            hidden = owner[None, :] != torch.arange(5)[:, None]
        return reference(q, kv, kv, attn_mask=hidden)[0]

    def linear(layer, h):
        return h @ layer.weight.double().T + layer.bias.double()

    def norm(layer, h):
        return F.layer_norm(h, h.shape[-1:], layer.weight.double(), layer.bias.double())

    f = norm(module.vision_norm, linear(module.vision_proj, x.double()))
    scanned = f
    if config.scan_order != "backward":
        scanned = scanned + mamba(module.connector.forward_mixer, f)
    if config.scan_order != "forward":
        scanned = scanned + mamba(module.connector.backward_mixer, f.flip(1)).flip(1)
    q = torch.stack([module.queries.double()] * len(x))
    for block in module.blocks:
        q = norm(block.mixer_norm, q)
        q = q + mamba(block.mixer, q)
        q = linear(block.fuse, torch.cat([q, attention(block.cross_attn, q, scanned)], dim=2))
        q = norm(block.mlp_norm, q)
        q = q + linear(block.fc2, F.gelu(linear(block.fc1, q)))
    return linear(module.output, q)


CHANGES = [{}, {"local_attention": False}, {"scan_order": "forward"}, {"scan_order": "backward"}]


@pytest.mark.long
@pytest.mark.parametrize("changes", CHANGES, ids=str)
@backends
def test_projector_equals_the_equations(changes, backend):
    """Breaks when connector, mask, cross-attention, fusion or feed-forward depart from the paper's
    description."""
    module = projector(**changes)
    set_attention_backend(module, backend)
    with torch.no_grad():
        assert module(FEATURES).shape == (2, 5, TEXT.hidden_size)
        # fp32 against fp64: up to 1.4e-6 of rounding, which depends on the number of threads
        assert relative_error(module(FEATURES), by_other_hands(module, FEATURES)) <= 3e-6


@torch.no_grad()
def test_projectors_without_queries():
    """Breaks when a feature is lost, the parts are not those of a projector with queries, or tokens
    do not fit."""
    x = FEATURES
    whole = fresh_projector(CONFIG, 3)
    for kind in ("connector", "linear"):
        config = replace(CONFIG, projector=replace(PROJECTOR, projector=kind))
        module = fresh_projector(config, 3)
        out = module(x)
        read = whole.connector(whole.vision_norm(whole.vision_proj(x)))
        expected = whole.output(read) if kind == "connector" else F.linear(x, *module.parameters())
        assert relative_error(out, expected) <= 1e-6
        assert config.num_image_tokens == out.shape[1] == 16


@pytest.mark.parametrize("layer", [-2, 0, 1])
def test_features_are_those_of_the_layer_asked_for(layer, seeded):
    """Breaks when another layer is read than transformers' hidden_states has there, or the final
    norm is applied."""
    sizes = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "patch_size": 14, "image_size": 60}
    config = transformers.SiglipVisionConfig(**sizes, vision_use_head=False)
    hf = transformers.SiglipVisionModel(config).eval()
    tower = Siglip(replace(VISION, feature_layer=layer))
    state = hf.state_dict()
    tower.load_state_dict({name.removeprefix("vision_model."): state[name] for name in state})
    pixels = torch.rand(2, 3, 60, 60) * 2 - 1  # no multiple of the patch, as 384 is none of 14
    with torch.no_grad():
        expected = hf(pixels, output_hidden_states=True).hidden_states[layer]
        assert relative_error(tower(pixels), expected) <= 1e-6


def test_pictures_take_their_places():
    """Breaks when the projector's queries are not read at the image tokens, in order, unscaled, row
    by row."""
    whole = randomized(QMamba(CONFIG)).eval()
    inputs = left_padded(((6, 0), (3, 0)), 5, 60, IMAGE)
    with torch.no_grad():
        queries = whole.multi_modal_projector(whole.vision_tower(inputs["pixel_values"]))
        x = whole.language_model.embeddings(inputs["input_ids"].clamp(max=58))
        x[0, :5] = queries[0]
        x[1, 3:8] = queries[1]
        expected = whole.language_model.head(whole.language_model(x, inputs["attention_mask"]))
        valid = inputs["attention_mask"].bool()
        assert relative_error(whole(**inputs)[valid], expected[valid]) <= 1e-6


@pytest.mark.long
def test_every_part_learns():
    """Breaks when a part is cut off from the loss, or a fresh model does not learn to tell two
    pictures apart."""
    whole = initialize_qmamba(QMamba(CONFIG))
    inputs = left_padded(((2, 0), (2, 0)), 5, 60, IMAGE)
    inputs["input_ids"][:, -2:] = torch.tensor([[7, 8], [7, 9]])  # the same question, other answers
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(whole(**inputs)[:, -2], inputs["input_ids"][:, -1])
        loss.backward()
        losses.append(loss.item())
        if len(losses) == 1:
            idle = {name for name, p in whole.named_parameters() if p.grad is None}
            unread = r"vision_tower\.(encoder\.layers\.2|post_layernorm)\..*"
            assert idle == {*parameter_names(whole, unread)}
            flat = {
                name for name, p in whole.named_parameters() if not (p.grad is None or p.grad.any())
            }
            assert all(name.endswith("k_proj.bias") for name in flat)  # a shift of all keys
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 3
    assert losses[-1] < 0.1


def test_initialization_is_reproducible_and_of_unit_size():
    """Breaks when a seed does not fix the weights, or a fresh projector's output overwhelms the
    text beside it."""
    a, b = (initialize_qmamba(QMamba(CONFIG), seed=4) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    projector = a.multi_modal_projector
    assert abs(projector.queries.std().item() - 0.02) < 5e-3
    mixers = [block.mixer for block in projector.blocks] + [projector.connector.forward_mixer]
    depths = [(m.out_proj.weight.abs().max() * 48**0.5).item() for m in mixers]
    assert depths == pytest.approx([2**-0.5, 2**-0.5, 1.0], rel=0.01)
    assert 0.1 < projector(FEATURES).std() < 10
