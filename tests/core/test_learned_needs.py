"""Issue 27, 1: the need that is suggested for a model, from the runs that were seen or from the size in its name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.learned_needs import (
    LONGEST_MODEL,
    MOST_RUNS,
    Group,
    Run,
    Seen,
    advice,
    group_of,
    p95,
    together,
)
from scheduler.core.model_table import ModelTable
from scheduler.core.size_guess import ADAPTERS, RUN, TRAINING, billions_in, guess_from_run, guessed_mib, use_of
from scheduler.core.suggested_need import Learned, highest, need_for, suggestion

GIB = 1024
A100 = [Gpu(0, "GPU-a", memory_mib=80 * GIB), Gpu(1, "GPU-b", memory_mib=80 * GIB)]


def seen(*peaks: int | None) -> Seen:
    """Return runs with these peaks in GiB."""
    runs = Seen()
    for peak in peaks:
        runs = runs.with_run(Run(None if peak is None else peak * GIB, 60.0, 0.5))
    return runs


def peaks_of(runs: Seen) -> dict[int, int]:
    return highest([(1, runs.peak_mib)])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-7b-inst", 7.0), ("Qwen2.5-0.5B", 0.5), ("llama-3.1-70B-Instruct-AWQ", 70.0), ("meta-llama/Llama-2-13b-hf", 13.0),
        ("mixtral-8x7b", 46.48), ("Mixtral_8x22B_v0.1", 146.08), ("qwen3-30b-a3b", 30.0), ("opt-125m", 0.125), ("gpt2", None),
        ("resnet50", None), ("bert-base", None), ("v2b-model", None), ("deepseek-r1-671b", 671.0), ("phi-3.8b_4bit", 3.8),
        ("llama3b", None), ("99999b", None), ("", None), ("model-7bit", None),
    ],
)  # fmt: skip
def test_the_size_in_a_model_name(name: str, billions: float | None) -> None:
    assert billions_in(name) == (None if billions is None else pytest.approx(billions))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("qwen2.5-7b-inst", 18, 21), ("qwen2.5-32b", 72, 80), ("qwen2.5-32b-awq", 22, 27), ("llama-8b-4bit", 8, 10), ("llama-8b-int8", 12, 15),
        ("llama-8b-bnb-4bit", 8, 10), ("llama-8b-fp8", 12, 15), ("llama-8b-gguf-q4_k_m", 8, 10), ("tiny-1b-fp32", 7, 9),
    ],
)  # fmt: skip
def test_the_guess_knows_number_formats(name: str, least: int, most: int) -> None:
    guess = guessed_mib(name)
    assert guess is not None and least * GIB <= guess <= most * GIB


@pytest.mark.parametrize(
    ("runs", "before", "need", "basis"),
    [
        (seen(31), "0.25", "0.45", "seen"), (seen(10, 31, None), None, "0.45", "seen"), (seen(79), "1", "1", "seen"),
        (seen(30), "2", "2x0.45", "seen"), (seen(None), None, "0.25", "guess"), (Seen(), None, "0.25", "guess"),
        (seen(100), "1", "2", "seen"),
    ],
)  # fmt: skip
def test_the_suggestion_is_the_peak_with_a_margin_or_a_guess(
    runs: Seen, before: str | None, need: str, basis: str
) -> None:
    found = suggestion("qwen2.5-7b-inst", peaks_of(runs), A100, ResourceRequest.parse(before) if before else None)
    assert found is not None and (str(found.need), found.basis) == (need, basis)


def test_a_need_that_is_a_mig_instance_stays() -> None:
    """Such a need says which instance; a share of a whole GPU would be another thing."""
    table = ModelTable("1", {"m-7b": "mig-1g.10gb", "n": "2x0.5"})
    groups = {Group("", model, "/a.py", "A100"): seen(8) for model in ("m-7b", "n")}
    mixed = [*A100, Gpu(100, "MIG-a", memory_mib=10 * GIB, profile="1g.10gb")]
    mig, two = advice(table, groups, mixed)
    assert mig.suggestion is None and not mig.differs
    assert two.suggestion is not None and str(two.suggestion.need) == "2x0.15" and two.differs


def a_job(*arguments: str) -> Job:
    return Job(id=1, spec=JobSpec(arguments=arguments), need=ResourceRequest(1, WHOLE), gpus=(0,))


def test_the_group_of_a_job_can_be_recorded_whatever_its_words_are() -> None:
    """The store records only UTF-8; a name that cannot be in a model table is not learned."""
    gpus = {gpu.index: gpu for gpu in A100}
    assert group_of(a_job("run", "--llm", "mödel '7b'\n"), gpus) == Group(
        "", "mödel '7b'\n", "run mödel '7b'", "declared"
    )
    assert group_of(a_job("run\udcff", "--llm=m"), gpus) == Group("", "m", "run\\udcff", "declared")
    for name in ("\udcff-7b", "x" * (LONGEST_MODEL + 1)):
        assert group_of(a_job("run", "--llm", name), gpus) is None


def test_nothing_is_suggested_if_nothing_is_known() -> None:
    assert suggestion("resnet50", {}, A100) is None
    assert suggestion("qwen2.5-7b-inst", {1: 31 * GIB}, [Gpu(0, "declared:0")]) is None


@given(
    st.lists(st.integers(1, 200 * GIB), min_size=1),
    st.lists(st.integers(GIB, 200 * GIB), min_size=1),
    st.integers(1, 8),
)
def test_a_suggestion_has_room_for_the_highest_peak(peaks: list[int], sizes: list[int], count: int) -> None:
    """On the smallest GPU that has the memory, and in all GPUs together if none has it."""
    runs = Seen()
    for peak in peaks:
        runs = runs.with_run(Run(peak, 1.0, None))
    gpus = [Gpu(number, f"GPU-{number}", memory_mib=size) for number, size in enumerate(sizes)]
    found = suggestion("any", peaks_of(runs), gpus, ResourceRequest(count, WHOLE))
    assert found is not None and found.need == need_for(found.mib, sizes, count)
    assert ResourceRequest.parse(str(found.need)) == found.need, "it can be written into the model table"
    fitting = [size for size in sizes if size >= found.mib]
    if fitting:
        assert found.need.count == count and min(fitting) * found.need.parts // WHOLE >= max(peaks)
    else:
        assert found.need.count * max(sizes) >= max(peaks) * count and found.need.parts == WHOLE


@given(st.lists(st.lists(st.integers(0, 1000), max_size=150), max_size=4))
def test_groups_are_counted_together_and_keep_their_highest_peak(groups: list[list[int]]) -> None:
    parts = []
    for peaks in groups:
        part = Seen()
        for peak in peaks:
            part = part.with_run(Run(peak, 1.0, None))
        assert len(part.runs) == min(MOST_RUNS, len(peaks))
        parts.append(part)
    every = [peak for peaks in groups for peak in peaks]
    whole = together(parts)
    assert (whole.count, whole.peak_mib) == (len(every), max(every, default=None))


def test_p95_is_the_nearest_rank() -> None:
    assert p95(range(1, 101)) == 95 and p95([3.0]) == 3.0 and p95([]) is None


def test_the_advice_has_the_models_of_the_table_and_those_that_ran() -> None:
    table = ModelTable("1", {"qwen2.5-7b-inst": "0.5", "never-ran": "2"})
    runs = seen(31, 10).with_run(Run(33 * GIB, 5.0, 1.0, OUT_OF_MEMORY))
    groups = {
        Group("", "qwen2.5-7b-inst", "/a.py", "A100"): runs,
        Group("", "qwen2.5-7b-inst", "/b.py", "A100"): seen(36),
        Group("", "other-1b", "/a.py", "A100"): seen(None),
    }
    found = {one.model: one for one in advice(table, groups, A100)}
    assert list(found) == ["never-ran", "other-1b", "qwen2.5-7b-inst"]
    seven = found["qwen2.5-7b-inst"]
    assert (seven.table, seven.runs, seven.peak_mib, seven.p95_mib) == ("0.5", 4, 36 * GIB, 36 * GIB)
    assert (seven.load, seven.wall_s, seven.out_of_memory) == (0.625, 60.0, 1)
    assert seven.suggestion is not None and str(seven.suggestion.need) == "0.5" and not seven.differs
    guess = found["other-1b"].suggestion
    assert guess is not None and guess.basis == "guess" and not found["other-1b"].differs
    assert found["never-ran"].suggestion is None


def test_a_need_below_the_peak_differs() -> None:
    table = ModelTable("1", {"m": "0.25", "n": "0.45"})
    groups = {Group("", model, "/a.py", "A100"): seen(31) for model in ("m", "n")}
    assert [(one.model, one.differs) for one in advice(table, groups, A100)] == [("m", True), ("n", False)]


@pytest.mark.parametrize(
    ("peaks", "before", "need"),
    [
        ({2: 40}, None, "2x0.55"), ({2: 40}, "1", "2"), ({2: 30}, "1", "0.85"), ({1: 20, 2: 10}, None, "0.3"),
        ({1: 20}, "2x0.5", "2x0.3"), ({4: 60}, "2", "4"), ({3: 50}, None, "3x0.7"),
    ],
)  # fmt: skip
def test_runs_on_several_gpus_suggest_as_much_memory_in_all(
    peaks: dict[int, int], before: str | None, need: str
) -> None:
    """Two GPUs with 40 GiB each are 80 GiB on one: more than it has, with the margin."""
    wanted = {count: mib * GIB for count, mib in peaks.items()}
    found = suggestion("m", wanted, A100, ResourceRequest.parse(before) if before else None)
    assert found is not None and str(found.need) == need


def test_learned_runs_are_counted_with_their_peaks_by_number_of_gpus() -> None:
    learned = Learned(0, {}).with_run(1, 10).with_run(2, 30).with_run(1, None).with_run(1, 7)
    assert learned == Learned(4, {1: 10, 2: 30}) and learned.peak_mib == 30


@pytest.mark.parametrize(
    ("script", "words", "use"),
    [
        ("train.py", (), TRAINING), ("finetune_7b.py", (), TRAINING), ("run-sft.sh", (), TRAINING), ("trainer.py", (), TRAINING),
        ("constraints.py", (), RUN), ("eval.py", ("--train_batch_size", "8"), RUN), ("train.py", ("--lora_r", "8"), ADAPTERS),
        ("qlora.py", (), ADAPTERS), ("florance.py", (), RUN), ("eval.py", (), RUN), ("", (), RUN),
    ],
)  # fmt: skip
def test_the_words_of_a_job_tell_whether_it_trains_its_model(script: str, words: tuple[str, ...], use: str) -> None:
    assert use_of(script, words) == use


def test_training_is_guessed_to_need_more_and_at_most_one_gpu() -> None:
    needs = [suggestion("m-3b", {}, A100, use=use) for use in (RUN, ADAPTERS, TRAINING)]
    assert [str(one.need) for one in needs if one is not None] == ["0.15", "0.25", "0.75"]
    large = suggestion("m-70b", {}, A100, use=TRAINING)
    assert large is not None and str(large.need) == "1", "a script that trains on several GPUs asks for them"
    assert suggestion("m", {}, A100, use=TRAINING) is None


def test_a_model_without_a_size_in_its_name_is_guessed_from_its_runs_with_other_scripts() -> None:
    found = [suggestion("phi", {}, A100, use=use, run_mib=12 * GIB) for use in (RUN, ADAPTERS, TRAINING)]
    assert [str(one.need) for one in found if one is not None] == ["0.15", "0.25", "0.85"]
    assert guess_from_run(1 * GIB, RUN) >= 1 * GIB and guess_from_run(30 * GIB, RUN) == 30 * GIB


def test_a_run_that_failed_early_tells_no_peak_until_a_run_was_good() -> None:
    early, late = Run(600, 1.0, None, "otherwise"), Run(9_000, 9.0, None, "otherwise")
    assert Seen().with_run(early).peak_mib is None
    assert Seen().with_run(late).with_run(Run(5_000, 9.0, None)).peak_mib == 9_000
    assert Seen().with_run(Run(5_000, 9.0, None)).with_run(late).peak_mib == 9_000
    assert Seen().with_run(Run(7_000, 9.0, None, OUT_OF_MEMORY)).peak_mib == 7_000
    assert highest([(1, 0), (2, None)]) == {}, "it ended before it used the GPU"
