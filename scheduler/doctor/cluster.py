"""Check of the cluster, if the settings name an engine such as Slurm."""

from __future__ import annotations

from scheduler.core.engine import EngineDown, Report
from scheduler.core.errors import SchedulerError
from scheduler.doctor.examination import ANSWER_S, Examination
from scheduler.doctor.finding import Finding, Mark, good


def check_cluster(exam: Examination) -> list[Finding]:
    """Check whether the engine tells its nodes; on a single server there is nothing to check."""
    if exam.config.engine == "local":
        return []
    from scheduler.runners.connect_engine import engine_of

    try:
        engine = engine_of(lambda: exam.config, exam.environ, ANSWER_S)
    except SchedulerError as error:
        return [Finding("cluster", Mark.BAD, f"engine: {exam.config.engine}", error.what, error.do)]
    try:
        return judge_report(engine.title, engine.report())
    except EngineDown as error:
        return [Finding("cluster", Mark.BAD, f"{engine.title} cannot be used", str(error), "")]


def judge_report(title: str, report: Report) -> list[Finding]:
    """Return the findings on the nodes of an engine: one on all of them, and one on each node that gets no jobs."""
    gpus = sum(len(node.types) for node in report.nodes)
    seen = f"{title} answers: {gpus} GPUs on {len(report.nodes)} nodes"
    if report.shards is not None:
        seen += f", {report.shards} shards for each GPU" if report.shards else ", no shards: shares become whole GPUs"
    if not gpus:
        return [Finding("cluster", Mark.WARN, seen, "jobs that need a GPU will wait for ever", "")]
    out = [Finding("cluster", Mark.WARN, seen, note, "") for note in report.notes] or [good("cluster", seen)]
    return out + [Finding("node", Mark.WARN, node.name, node.problem, "") for node in report.nodes if node.problem]
