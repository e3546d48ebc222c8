"""Links that work where pages are read unbuilt, such as on a code host, and in the site.

A page that is generated with the site has no file to link to. Pages link to what it is made from,
or to its likeness in the repository; in the site the generated page takes its place:

    [The gallery](../src/penstock/schedules)  ->  [The gallery](gallery.md)
"""

import re
from posixpath import dirname, normpath, relpath

__all__ = ["TARGETS", "with_site_links"]

# By path in the repository: the page of the site.
TARGETS = {
    "playground.html": "live/playground.html",
    "examples": "examples.md",
    "src/penstock/schedules": "gallery.md",
}
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#:\s]+)\)")


def with_site_links(page: str, markdown: str) -> str:
    """Return a page, given by its path below docs, with the links of the site.

    >>> with_site_links("howto/learner.md", "[Try it](../../playground.html)")
    '[Try it](../live/playground.html)'
    """
    folder = dirname(page)

    def in_site(link: re.Match[str]) -> str:
        target = TARGETS.get(normpath(f"docs/{folder}/{link[1]}"))
        return link[0] if target is None else f"]({relpath(target, folder or '.')})"

    return _LINK.sub(in_site, markdown)
