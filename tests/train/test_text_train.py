"""Language models from nothing: what rows are made of, and that a run resumes to the bit."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.systems.text.corpus import open_corpus
from eval.systems.text.tasks import QUESTIONS, RECORDS, SYMBOLS, Tasks
from model.systems.configs import BOS, EOS
from model.systems.language import new_model
from tests.files import prose, write_prose
from tests.pair import in_pair
from tests.runs import assert_same_tensors, metrics, refused, refuses
from train.systems import text
from train.systems.text import TextOrder, TextSettings, draw_documents, main, text_optimizer
from weights.load import load_model

SETTINGS = TextSettings(preset="nano", length=128, batch_size=2, tokens=2000)
SMALL = "--preset nano --length 128 --batch-size 2 --tokens 2000 --checkpoint-every 3"


def test_rows_are_full_of_whole_documents(corpus):
    """Breaks when a row has padding, a task document is cut, text crosses a file's end, or the
    curriculum is lost."""
    tasks = Tasks(corpus, "train")
    kinds = Counter()
    train = corpus.tokenizer.decode(corpus.ids["train"].tolist())
    for number in range(60):
        row = draw_documents(corpus, tasks, SETTINGS, number)
        assert sum(len(document) - 1 for document in row) == SETTINGS.length
        for document in row:
            text = corpus.tokenizer.decode(document[1:])
            assert document[0] == BOS
            assert EOS not in document[1:-1]
            if "«" not in text:
                kinds["text"] += 1
                assert text in train
                continue
            assert document[-1] == EOS
            kind = "needles" if re.search(r"[^»]\n", text) else "examples"
            kinds[kind] += 1
            # the curriculum: 0.35 of 16 rows hold recall alone
            assert kind == "examples" or number >= 6
    assert min(kinds[kind] for kind in ("text", "needles", "examples")) > 15
    for length in (64, 66, 101):  # the last example's answer and the end fit into a short row
        settings = replace(SETTINGS, length=length, needles=0.0, examples=1.0)
        assert all(
            draw_documents(corpus, tasks, settings, number)[0][-1] == EOS for number in range(200)
        )


def test_targets_are_the_next_tokens_of_the_same_document(corpus):
    """Breaks when a target is of another document than its input, a token that nothing foretells is
    learned, or two seeds learn the same rows."""
    order = TextOrder(corpus, SETTINGS)
    batch = order[range(3, 5)]
    unforeseen = {*map(corpus.tokenizer.piece_to_id, (*RECORDS, *QUESTIONS))}
    for at, number in enumerate((3, 4)):
        ids, documents, targets = [], [], []
        for n, document in enumerate(draw_documents(corpus, order.tasks, SETTINGS, number)):
            ids += document[:-1]
            documents += [n] * (len(document) - 1)
            targets += [-100 if token in unforeseen else token for token in document[1:]]
        assert batch.input_ids[at].tolist() == ids
        assert batch.documents[at].tolist() == documents
        assert batch.targets[at].tolist() == targets
    assert batch.tokens == (batch.targets != -100).sum() < 2 * SETTINGS.length
    other = TextOrder(corpus, replace(SETTINGS, seed=1))[range(3, 5)]
    assert not torch.equal(other.input_ids, batch.input_ids)


def test_decay_leaves_norms_scalars_and_the_embedding_alone():
    """Breaks when the optimizer leaves parameters out, or decay pulls norms, λ or the embedding."""
    model = new_model("nano", True)
    bare, decayed = text_optimizer(model, SETTINGS).param_groups
    assert bare["weight_decay"] == 0
    assert {*bare["names"], *decayed["names"]} == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed_tokens" not in name
        assert (name in decayed["names"]) == is_matrix


@pytest.mark.long
@pytest.mark.parametrize("kind", ["differential", "plain"])
def test_a_run_resumes_to_the_bit(tmp_path, kind):
    """Breaks when an interrupted run ends elsewhere than an uninterrupted one, or learns an edited
    text."""
    text = write_prose(tmp_path / "text")
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    main(f"{SMALL} --attention {kind} --text {text} --out {whole}".split())
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns("model", "step-8"))
    assert [step.name for step in (cut / "checkpoints").iterdir()] == [
        "step-6"
    ]  # 2000 tokens are 8 steps of 256
    (text / "0.txt").write_text(prose(1000))
    main(f"--resume {cut}".split())
    assert_same_tensors(*(load_model(run / "model").state_dict() for run in (cut, whole)))
    assert metrics(cut) == metrics(whole)


def test_a_model_keeps_the_tokenizer_that_it_learned_with(text_folder, tmp_path, monkeypatch):
    """Breaks when another run makes the corpus anew meanwhile, and a model gets its tokenizer."""
    learn = text.train_text

    def disturbed(settings, corpus, *rest):
        open_corpus(Path(settings.corpus), [write_prose(tmp_path / "other")], known=SYMBOLS)
        return learn(settings, corpus, *rest)

    monkeypatch.setattr(text, "train_text", disturbed)
    flags = f"{SMALL} --tokens 256 --text {text_folder} --corpus {tmp_path}/corpus"
    refuses(text, f"{flags} --out {tmp_path}/run", "another run has made this corpus anew")
    assert not (tmp_path / "run/model").exists()


@pytest.mark.long
def test_two_processes_learn_what_one_does(text_folder, corpus, tmp_path):
    """Breaks when a row is learned twice or not, or FSDP2 loses a weight."""
    settings = replace(SETTINGS, step_batch=6)
    refused(lambda: TextOrder(corpus, settings, 0, 4), "--step-batch 6: ", "4 processes")
    # 4 steps of 6 rows
    step = f"{SMALL} --tokens {4 * 6 * 128} --step-batch 6 --checkpoint-every 2"
    step += f" --text {text_folder} --corpus {tmp_path}/corpus --out {tmp_path}"
    # each process takes 3 rows of a step, in micro-batches of 2 and 1
    in_pair(main, f"{step}/ddp", f"{step}/sharded --shard", meet=tmp_path)
    main(f"{step}/alone --batch-size 6".split())
    assert len(list((tmp_path / "sharded/checkpoints/step-4").glob("shard-*.safetensors"))) == 2
    alone = tmp_path / "alone"
    for run in (tmp_path / "ddp", tmp_path / "sharded"):
        for ours, theirs in zip(metrics(run), metrics(alone), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
            assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
        ours, theirs = (load_model(folder / "model").state_dict() for folder in (run, alone))
        apart = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in theirs])
        # AdamW moves a weight by a whole rate where rounding turns a gradient near 0
        assert apart.mean() < 1e-5
