"""Tests of how many GPUs a job needs.

If the job has a request of its own, this request is its need. Otherwise the model table gives the need of the job's
model. If the table does not contain the model, the default of the table is used. Without a model table, the default
is one GPU.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.core.errors import UsageError
from scheduler.core.gpu import ANY_DEVICE, BY_MEMORY, Gpu, ResourceRequest
from scheduler.core.job import JobSpec
from scheduler.core.model_table import (
    ModelTable,
    booking_memory,
    model_in,
    need_of,
    table_from,
    vram_notes,
    with_need_notes,
)
from scheduler.core.suggested_need import Learned
from tests.builders import a_gpu, a_spec, an_instance

TABLE = ModelTable("0.7", {"qwen2.5-3b-inst": "0.5", "qwen2.5-32b-inst": "2", "odd": "1.5"})


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("--llm qwen", "qwen"),
        ("--llm=qwen", "qwen"),
        ("--epochs 3 --llm qwen --lr 1", "qwen"),
        ("--llm a --llm b", "b"),
        ("--llm a --llm=b", "b"),
        ("--llm=a --llm b", "b"),
        ("--llm", None),
        ("--llm a --llm", "a"),
        ("--llm=", ""),
        ("-- --llm qwen", None),
        ("--llm a -- --llm b", "a"),
        ("--llms qwen", None),
        ("--llm-path qwen", None),
        ("llm qwen", None),
        ("", None),
    ],
)
def test_the_model_is_the_last_llm_argument_before_a_double_dash(words: str, model: str | None) -> None:
    """S3.13: The model of a job is the value of its last `--llm` argument. Arguments after a bare `--` do not count."""
    assert model_in(words.split()) == model


@pytest.mark.parametrize(
    ("words", "need"),
    [
        ("--llm qwen2.5-3b-inst", "0.5"),
        ("--llm=qwen2.5-3b-inst", "0.5"),
        ("--llm qwen2.5-32b-inst", "2"),
        ("--llm unknown", "0.7"),
        ("--epochs 3", "0.7"),
        ("", "0.7"),
    ],
)
def test_a_job_needs_what_the_model_table_says_else_its_default(words: str, need: str) -> None:
    """S3.13: A job needs what the model table says for its model.

    If the table does not contain the model, the job needs the default of the table.
    """
    assert need_of(a_spec(arguments=tuple(words.split())), TABLE)[0] == ResourceRequest.parse(need)


def test_without_a_model_table_a_job_needs_one_gpu() -> None:
    """S3.13: Without a model table a job needs one GPU."""
    assert need_of(a_spec(arguments=("--llm", "qwen2.5-3b-inst")), ModelTable()) == (
        ResourceRequest(1, 1000),
        ("model qwen2.5-3b-inst is unknown, because there is no model table; the job requests the default, 1",),
    )
    assert need_of(a_spec(arguments=("--lr", "1")), ModelTable()) == (ResourceRequest(1, 1000), ())


def test_the_request_of_a_job_overrides_that_of_its_model() -> None:
    spec = a_spec(arguments=("--llm", "qwen2.5-3b-inst"), gpus="2x0.25")
    assert need_of(spec, TABLE) == (ResourceRequest(2, 250), ())


@pytest.mark.parametrize(
    ("changes", "need", "notes"),
    [
        ({"on": (0,)}, ResourceRequest(1, 0), ()),
        ({"on": (1, 3), "arguments": ("--llm", "odd")}, ResourceRequest(2, 0), ()),  # not the model's need
        ({"on": (0, 1, 2), "allowed": (0, 1, 2)}, ResourceRequest(3, 0), ()),
        ({"gpus": "0"}, ResourceRequest(0, 0), ()),
        ({"gpus": "0", "slots": 1}, ResourceRequest(0, 0), ()),
        ({"gpus": "0", "slots": 3}, ResourceRequest(0, 3), ()),
        ({"gpus": "0.5", "slots": 3}, ResourceRequest(1, 500), ("slots=3 has no effect: the job needs 0.5 of one GPU",)),
        ({"slots": 2}, ResourceRequest(1, 700), ("slots=2 has no effect: the job needs 0.7 of one GPU",)),
        (
            {"slots": 2, "arguments": ("--llm=odd",)}, ResourceRequest(2, 1000),
            ("the request for 1.5 GPUs is rounded up to 2 whole GPUs", "slots=2 has no effect: the job needs 2 whole GPUs of one server"),
        ),
    ],
)  # fmt: skip
def test_named_gpus_and_slots_override_the_model_table(
    changes: dict[str, Any], need: ResourceRequest, notes: tuple[str, ...]
) -> None:
    """S4.19 S4.31: If a job names its GPUs, or requests slots instead of GPUs, the model table is not used."""
    assert need_of(a_spec(**changes), TABLE) == (need, notes)


def test_slots_apply_if_the_model_table_says_no_gpu() -> None:
    """S4.19: If the model table says that a job needs no GPU, the job takes the number of slots that it requests."""
    assert need_of(a_spec(slots=4), ModelTable("0")) == (ResourceRequest(0, 4), ())


def test_the_note_on_an_unknown_model_names_the_most_similar_model() -> None:
    _, notes = need_of(a_spec(arguments=("--llm", "qwen2.5-3b-instr")), TABLE)
    assert notes == (
        "model qwen2.5-3b-instr is not in the model table (did you mean qwen2.5-3b-inst?); "
        "the job requests the default, 0.7",
    )
    _, notes = need_of(a_spec(arguments=("--llm", "zzz")), TABLE)
    assert notes == ("model zzz is not in the model table; the job requests the default, 0.7",)


def test_rounding_up_the_need_of_a_model_is_noted() -> None:
    assert need_of(a_spec(arguments=("--llm=odd",)), TABLE) == (
        ResourceRequest(2, 1000),
        ("the request for 1.5 GPUs is rounded up to 2 whole GPUs",),
    )


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("python t.py --llm qwen2.5-3b-inst", "0.5"),
        ("python t.py --llm 'qwen2.5-3b-inst'", "0.5"),
        ("it's --llm odd", "2"),
    ],
)
def test_the_model_of_a_shell_command_is_found_in_its_text(text: str, need: str) -> None:
    assert need_of(JobSpec(source="commands", arguments=("sh", "-c", text)), TABLE)[0] == ResourceRequest.parse(need)


@pytest.mark.parametrize(
    ("data", "table"),
    [
        ({}, ModelTable("1", {})),
        ({"default_requirement": 0.5}, ModelTable("0.5", {})),
        ({"default_requirement": 1.0, "models": {"a": 0.1, "b": 2, "c": "2x0.5"}}, ModelTable("1.0", {"a": "0.1", "b": "2", "c": "2x0.5"})),
    ],
)  # fmt: skip
def test_the_model_table_keeps_its_values_as_written(data: Any, table: ModelTable) -> None:
    assert table_from(data, "llm_config.json") == table


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "cannot read the model table: it is not a JSON object"),
        ({"model": {}}, "unknown key 'model'"),
        ({"models": [1]}, "cannot read models: it is not a JSON object"),
        ({"models": {"big": -1}}, "big: the need for GPUs cannot be below 0"),
        ({"models": {"big": "half"}}, "big: the need for GPUs must be a number"),
        ({"models": {"big": True}}, "big: the need for GPUs must be a number"),
        ({"models": {"big": None}}, "big: the need for GPUs must be a number"),
        ({"default_requirement": [1]}, "default_requirement: the need for GPUs must be a number"),
        ({"default_requirement": float("nan")}, "default_requirement: the need for GPUs must be a number"),
    ],
)
def test_the_error_for_an_invalid_model_table_names_file_and_key(data: Any, says: str) -> None:
    with pytest.raises(UsageError, match=r"^llm_config\.json: ") as caught:
        table_from(data, "llm_config.json")
    assert says in str(caught.value)


# -- memory instead of a share ---------------------------------------------------------------------------------

CARDS = [a_gpu(0, memory_mib=81_920), a_gpu(1, memory_mib=40_960), a_gpu(2, memory_mib=None)]


@pytest.mark.parametrize(
    ("vram_mib", "allowed", "need"),
    [
        (5_120, (0,), "0.063"),  # 62.5 thousandths, rounded up
        (5_120, (1,), "0.125"),
        (5_120, (0, 1), "0.125"),  # of the smaller GPU, since the job may be placed there
        (60_000, (0, 1), "0.733"),  # the smaller GPU is too small
        (40_960, (1,), "1"),
        (160, (0,), "0.002"),
        (90_000, (0, 1), "1"),  # no GPU is large enough: the job is refused elsewhere
        (5_120, (2,), "1"),  # the size of the GPU is not known
        (5_120, None, "1"),
    ],
)
def test_a_job_that_requests_only_memory_gets_the_corresponding_share(
    vram_mib: int, allowed: tuple[int, ...] | None, need: str
) -> None:
    spec = a_spec(vram_mib=vram_mib, allowed=allowed)
    unknown = allowed is None or 2 in allowed
    told = ("vram=5G is taken as a whole GPU, because the size of an allowed GPU is not known",) if unknown else ()
    assert need_of(spec, ModelTable(), CARDS) == (ResourceRequest.parse(need), told)
    assert need_of(spec, ModelTable()) == (ResourceRequest.parse("1"), ()), "the GPUs are not known yet"


def test_a_memory_that_is_meant_in_gib_is_pointed_out() -> None:
    """A job with `vram=18` asks for 18 MiB, which no CUDA program can do with."""
    need, notes = need_of(a_spec(vram_mib=18, allowed=(0,)), ModelTable(), CARDS)
    assert need == ResourceRequest(1, 1)
    assert notes == ("vram=18M is 18 MiB, less than any CUDA program uses; for GiB write 18G",)


@pytest.mark.parametrize(
    ("gpus", "vram_mib", "allowed", "need", "note"),
    [
        ("0.5", 5_120, (0,), "0.5", ""),
        ("0.5", 40_960, (0,), "0.5", ""),  # equal
        ("0.25", 40_960, (0,), "0.5", "vram=40G is 0.5 of the smallest allowed GPU that has it; the job books 0.5"),
        ("0.25", 40_960, (0, 1), "1", "vram=40G is all of the smallest allowed GPU that has it; the job books 1"),
        ("0.2", 60_001, (0, 1), "0.733", "vram=60001M is 0.733 of the smallest allowed GPU that has it; the job books 0.733"),
        ("2x0.25", 40_960, (0,), "2x0.5", "vram=40G is 0.5 of the smallest allowed GPU that has it; the job books 2x0.5"),
        ("2", 40_960, (0,), "2", ""),
        ("0.25", 90_000, (0, 1), "0.25", ""),  # no GPU is large enough: the job is refused elsewhere
        ("0.25", 5_120, (2,), "0.25", "vram=5G has no effect on GPUs of unknown size; the job books 0.25"),
        ("0.1", 10_240, None, "0.25", "vram=10G has no effect on GPUs of unknown size; the job books 0.25"),
        ("0", 5_120, (0,), "0", "vram=5G has no effect: the job needs no GPU"),
        ("0.25", 0, (0,), "0.25", ""),
        ("0.001", 40_960, (0,), "0.001", ""),  # as `booking_memory` writes it: the job books only memory
    ],
)  # fmt: skip
def test_of_a_share_and_the_part_that_the_memory_is_the_larger_counts(
    gpus: str, vram_mib: int, allowed: tuple[int, ...] | None, need: str, note: str
) -> None:
    spec = a_spec(gpus=gpus, vram_mib=vram_mib, allowed=allowed)
    found, notes = need_of(spec, ModelTable(), CARDS)
    assert (str(found), notes) == (need, (note,) if note else ())
    assert vram_notes(spec, found, CARDS) == notes


def test_the_share_of_a_known_model_counts_if_it_is_larger_than_the_requested_memory() -> None:
    words = ("--llm", "qwen2.5-3b-inst")
    assert need_of(a_spec(vram_mib=5_120, arguments=words), TABLE, CARDS[:1]) == need_of(a_spec(arguments=words), TABLE)
    need, (note,) = need_of(a_spec(vram_mib=61_440, arguments=words), TABLE, CARDS[:1])
    assert need == ResourceRequest(1, 750) and note.startswith("vram=60G is 0.75 of the smallest allowed GPU")


def test_the_notes_say_that_a_job_that_names_its_gpus_books_no_memory() -> None:
    need, (note,) = need_of(a_spec(vram_mib=5_120, on=(0,), allowed=(0,)), TABLE, CARDS)
    assert need.by_name and note == "vram=5G books no memory: the job starts on the GPUs that it names (on=)"


def test_a_new_note_about_memory_replaces_the_old_one() -> None:
    assert with_need_notes(("a", "vram=1G b", "c"), ("vram=2G b", "d")) == ("a", "c", "vram=2G b")


def test_the_share_for_an_unknown_model_is_computed_from_its_memory() -> None:
    need, (note,) = need_of(a_spec(vram_mib=5_120, arguments=("--llm", "zzz")), TABLE, CARDS[:1])
    assert need == ResourceRequest(1, 63) and note.endswith("requests the share computed from its vram, 0.063")


def test_a_model_table_can_be_written_as_json_and_read_back() -> None:
    assert table_from(json.loads(TABLE.as_json()), "") == TABLE


def test_a_job_that_asks_only_for_memory_may_get_a_gpu_or_a_mig_instance() -> None:
    card, instance = a_gpu(0, memory_mib=80_000), a_gpu(200, memory_mib=10_000, profile="1g.10gb")
    table = ModelTable("1", {"m": "0.5"})
    assert need_of(a_spec(vram_mib=8_000), table, [card, instance])[0] == ResourceRequest(1, 800, ANY_DEVICE)
    assert need_of(a_spec(vram_mib=8_000), table, [card])[0] == ResourceRequest(1, 100)
    plain = [a_spec(), a_spec(gpus="0.5", vram_mib=8_000), a_spec(arguments=("--llm", "m"), vram_mib=8_000)]
    assert {need_of(spec, table, [card, instance])[0].profile for spec in plain} == {""}
    assert need_of(a_spec(gpus="mig-1g.10gb"), table, [card])[0] == ResourceRequest(1, 1000, "1g.10gb")


DIVIDED = [a_gpu(0, memory_mib=80_000), an_instance(200, memory_mib=10_000), an_instance(201, "3g.40gb", memory_mib=40_000)]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "need", "note"),
    [
        # A card is meant, so the memory is a part of the smallest card; the smaller instances do not count.
        (a_spec(gpus="0.05", vram_mib=8_000), ResourceRequest(1, 100), "vram=8000M is 0.1 of the smallest allowed GPU"),
        (a_spec(gpus="0.5", vram_mib=8_000), ResourceRequest(1, 500), ""),
        (a_spec(gpus="1", vram_mib=8_000), ResourceRequest(1, 1000), ""),
        (a_spec(gpus="mig-1g.10gb", vram_mib=8_000), ResourceRequest(1, 1000, "1g.10gb"), ""),
        (a_spec(vram_mib=8_000), ResourceRequest(1, 800, ANY_DEVICE), ""),
        (a_spec(vram_mib=30_000), ResourceRequest(1, 750, ANY_DEVICE), ""),
        (a_spec(vram_mib=8_000, allowed=(201,)), ResourceRequest(1, 200, ANY_DEVICE), ""),
        (booking_memory(a_spec(), 2_000, read=True), ResourceRequest(1, BY_MEMORY, ANY_DEVICE), ""),
    ],
)
def test_beside_mig_instances_memory_is_a_part_of_what_the_job_may_use(
    spec: JobSpec, need: ResourceRequest, note: str
) -> None:
    found, notes = need_of(spec, ModelTable(), DIVIDED)
    assert found == need and "".join(notes).startswith(note) and bool(notes) == bool(note)
    assert vram_notes(spec, found, DIVIDED) == notes


def test_an_instance_of_unknown_size_does_not_matter_to_a_job_for_a_card() -> None:
    unknown = [DIVIDED[0], an_instance(200, memory_mib=None)]
    assert need_of(a_spec(gpus="0.05", vram_mib=8_000), ModelTable(), unknown)[0] == ResourceRequest(1, 100)
    need, (note,) = need_of(a_spec(vram_mib=8_000), ModelTable(), unknown)
    assert need == ResourceRequest(1, 1000, ANY_DEVICE) and "is taken as a whole GPU" in note


@pytest.mark.parametrize(
    ("model", "need", "words"),
    [
        ("seen", "0.45", "learned from 12 runs of eval.py (at most 31 GiB of a GPU)"),
        ("seen-7b", "0.15", "learned from 1 run of eval.py (at most 10 GiB of a GPU)"),
        ("unmeasured-7b", "0.25", "0.25, a guess from the size in its name"),
        ("other-7b", "0.25", "0.25, a guess from the size in its name"),
        ("elsewhere", "0.4", "0.4, a guess from its runs with other scripts"),
        ("other", "1", "the job requests the default, 1"),
        ("known", "0.5", ""),
    ],
)
def test_a_model_that_the_table_does_not_know_gets_what_was_learned(model: str, need: str, words: str) -> None:
    learned = {
        ("seen", "eval.py"): Learned(12, {1: 31 * 1024}), ("seen-7b", "eval.py"): Learned(1, {1: 10 * 1024}), ("unmeasured-7b", "eval.py"): Learned(3, {}),
        ("known", "eval.py"): Learned(9, {1: 70 * 1024}), ("elsewhere", "other.py"): Learned(3, {1: 30 * 1024}),
    }  # fmt: skip
    table = ModelTable("1", {"known": "0.5"}, learned)
    gpus = [Gpu(0, "GPU-a", memory_mib=80 * 1024)]
    found, notes = need_of(a_spec(script="/data/eval.py", arguments=("--llm", model)), table, gpus)
    assert str(found) == need and words in "".join(notes)
    asked, _ = need_of(a_spec(script="/data/eval.py", arguments=("--llm", model), gpus="0.9"), table, gpus)
    by_memory, _ = need_of(a_spec(script="/data/eval.py", arguments=("--llm", model), vram_mib=8 * 1024), table, gpus)
    assert str(asked) == "0.9" and str(by_memory) == ("0.5" if model == "known" else "0.1")
    unknown, _ = need_of(a_spec(script="/data/eval.py", arguments=("--llm", model)), table, [Gpu(0, "declared:0")])
    assert str(unknown) == ("0.5" if model == "known" else "1"), "the size of the GPU is not known"
    assert need_of(a_spec(script="/data/eval.py", arguments=("--llm", model)), ModelTable("1", table.models), gpus)[
        0
    ].parts == (500 if model == "known" else 1000)


def test_a_new_note_about_the_model_replaces_the_old_one() -> None:
    assert with_need_notes(("model m is new", "a"), ("model m is known",)) == ("a", "model m is known")
    assert with_need_notes(("model m is new", "a"), ("model m is new",)) == ("model m is new", "a")
    assert with_need_notes(("model m is new", "a"), ()) == ("a",)


def test_a_guess_that_no_server_can_give_is_not_used() -> None:
    gpus = [Gpu(number, f"GPU-{number}", memory_mib=80 * 1024) for number in range(2)]
    found, notes = need_of(
        a_spec(script="/data/eval.py", arguments=("--llm", "llama-405b")), ModelTable("1", {}, {}), gpus
    )
    assert str(found) == "1" and "the default, 1" in notes[0]
    assert (
        str(
            need_of(
                a_spec(script="/data/eval.py", arguments=("--llm", "llama-70b")),
                ModelTable("1", {}, {}),
                [*gpus, *gpus],
            )[0]
        )
        == "3"
    )
