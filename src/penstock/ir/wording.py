"""The texts of findings that Python and the page in a browser share, as templates.

`WORDING["twice"].format(count=2)` gives the text. The page fills in the same templates.
"""

__all__ = ["WORDING"]

WORDING = {
    # What a list of actions must be; see `ir/text.py` and `ir/schedule.py`.
    "action": "not a valid action: {text} (expected STAGE KIND MICROBATCH, e.g. 2F0)",
    "empty": "the file is empty; write one line per rank, one action per cell",
    "cell": "rank {rank}, cell {cell}: {error}",
    "microbatch gap": "microbatch {microbatch} is named, but there are only {actions} actions; "
    "number the microbatches from 0 without gaps",
    "no compute": "the schedule has no compute action; add forwards such as 0F0",
    "stage gap": "stage {stage} is named, but there are only {actions} actions; "
    "number the stages from 0 without gaps",
    "stage missing": "stage {stage} never computes, but stage {last} does; "
    "number the stages from 0 without gaps",
    "stage twice": "rank {rank}, position {position}, {action}: stage {stage} also "
    "runs on rank {other}; a stage must be on one rank",
    "idle rank": "rank {rank} computes nothing; give every rank a stage",
    # What a schedule must be; see `checks/`.
    "placement": "stage {stage} is on rank {rank}",
    "missing": "is missing",
    "missing first": "is missing; microbatches must be numbered from 0",
    "twice": "appears {count} times",
    "other copy": "microbatch {microbatch} runs in another copy of the model",
    "whole and split": "the backward is both whole and split; keep B, or I and W",
    "other half": "its other half {action} is missing",
    "order": "comes before its {earlier} has ended",
    "deadlock": "deadlock: these actions wait for each other",
    "wait": "{stuck} waits for {awaited}",
    "place": "rank {rank}, position {position}, {action}",
    "problem": "{place}, {action}: {message} (rule: {rule})",
}
