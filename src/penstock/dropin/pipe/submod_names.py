"""How the stages of a traced pipe are called in its graph."""

__all__ = ["PP_SUBMOD_PREFIX", "get_submod_name"]

PP_SUBMOD_PREFIX = "submod_pp"


def get_submod_name(stage_idx: int) -> str:
    """Return the name of a stage in the graph of its pipe.

    >>> get_submod_name(2)
    'submod_pp_2'
    """
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"
