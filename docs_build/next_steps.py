"""The next steps of every page, which are listed at its end."""

from collections.abc import Iterable
from posixpath import dirname, relpath

__all__ = ["NEXT_STEPS", "with_next_steps"]

# By page: the targets, and what a reader finds there.
NEXT_STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "index.md": (("tour.md", "the tour in five minutes"),),
    "tour.md": (
        ("how-it-works.md", "why there is more than one schedule, in pictures"),
        ("howto/trainer.md", "train a model of your own"),
        ("howto/researcher.md", "make a schedule of your own"),
    ),
    "playground.md": (
        ("how-it-works.md", "why there is more than one schedule, in pictures"),
        ("gallery.md", "every schedule, drawn, with its origin"),
    ),
    "how-it-works.md": (
        ("gallery.md", "every schedule, drawn"),
        ("howto/learner.md", "try it yourself, without a GPU"),
    ),
    "howto/trainer.md": (
        ("running.md", "everything that a training step can do"),
        ("planning.md", "an order for your costs and memory"),
    ),
    "howto/researcher.md": (
        ("schedules.md", "schedules of your own, in full"),
        ("planning.md", "what no schedule can beat"),
    ),
    "howto/learner.md": (
        ("gallery.md", "every schedule, drawn"),
        ("glossary.md", "what the words mean"),
    ),
    "gallery.md": (
        ("schedules.md", "a schedule of your own"),
        ("planning.md", "let the planner find one"),
    ),
    "examples.md": (("howto/trainer.md", "from example to training"),),
    "splitting.md": (
        ("running.md", "train what you have split"),
        ("models.md", "which models were tested"),
    ),
    "models.md": (
        ("families.md", "every fifth family of the release, measured"),
        ("running.md", "train what you have split"),
    ),
    "families.md": (("running.md", "train what you have split"),),
    "running.md": (
        ("planning.md", "an order for your costs and memory"),
        ("performance.md", "what it costs, measured"),
    ),
    "integrations.md": (
        ("checkpoints.md", "checkpoints that any layout resumes"),
        ("limits.md", "what is known not to work"),
    ),
    "schedules.md": (
        ("planning.md", "let the planner find an order"),
        ("running.md", "train with it"),
    ),
    "planning.md": (
        ("running.md", "train with a plan, and revise it"),
        ("projection.md", "a cluster that you do not have yet"),
    ),
    "projection.md": (("published.md", "how far predictions of real runs are off"),),
    "published.md": (("planning.md", "what no schedule can beat"),),
    "coming-from-torch.md": (("running.md", "what a `penstock.Pipeline` adds"),),
    "coming-from/megatron.md": (
        ("splitting.md", "split a model that is not Megatron's"),
        ("limits.md", "what is missing"),
    ),
    "coming-from/deepspeed.md": (
        ("splitting.md", "split a model without listing its layers"),
        ("limits.md", "what is missing"),
    ),
    "faults.md": (("checkpoints.md", "save and resume"),),
    "checkpoints.md": (
        ("elastic.md", "continue with other ranks"),
        ("determinism.md", "the same numbers every time"),
    ),
    "elastic.md": (("determinism.md", "the same numbers every time"),),
    "determinism.md": (("soak.md", "how it is tested for hours"),),
    "soak.md": (("limits.md", "what is known not to work"),),
    "performance.md": (("limits.md", "what is known not to work"),),
    "limits.md": (("design.md", "how it is built, and why"),),
    "glossary.md": (("how-it-works.md", "the words in pictures"),),
    "design.md": (("where.md", "which file does what"), ("reference.md", "every public name")),
    "where.md": (("design.md", "why it is built this way"),),
    "reference.md": (
        ("reference-training.md", "what runs a schedule"),
        ("commands.md", "the command line"),
    ),
    "reference-training.md": (
        ("running.md", "the same in examples"),
        ("reference.md", "what plans and draws a schedule"),
    ),
    "commands.md": (("reference.md", "the same from Python"),),
    "changelog.md": (("tour.md", "the tour in five minutes"),),
}


def with_next_steps(page: str, markdown: str, titles: dict[str, str]) -> str:
    """Return a page with its next steps at the end; `titles` are those of existing pages."""
    steps = [(target, why) for target, why in NEXT_STEPS.get(page, ()) if target in titles]
    if not steps:
        return markdown
    return f"{markdown.rstrip()}\n\n---\n\n" + "\n".join(_lines(page, steps, titles)) + "\n"


def _lines(page: str, steps: Iterable[tuple[str, str]], titles: dict[str, str]) -> Iterable[str]:
    yield "**Next**\n"
    for target, why in steps:
        link = relpath(target, dirname(page) or ".")
        yield f"- [{titles[target]}]({link}): {why}"
