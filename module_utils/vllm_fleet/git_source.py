"""The source tree of an engine: one commit without its history, what a bundle or patches add, asserted and packed.

Only a checkout that this module began, known by a file inside ``.git``, is ever fetched into or checked out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tarfile
from typing import Any, Dict, List, Mapping, Sequence

from .errors import RefusedError

MARKER = "vllm-fleet-checkout"
FETCH_TIMEOUT_S = 3600.0


class Checkout:
    """A git working tree in ``path`` that belongs to one engine of the catalog."""

    def __init__(self, path: str, engine: str) -> None:
        self.path = path
        self.engine = engine

    def git(self, *words: str, ok: Sequence[int] = (0,), timeout: float = 600.0) -> str:
        """Run git and return what it printed.

        :raises RefusedError: ``git_failed`` with git's own last lines; ``no_git``.
        """
        # a person's settings for proxies and certificates stay; hooks, prompts and a surrounding repository do not
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env.update(GIT_TERMINAL_PROMPT="0", LC_ALL="C", GIT_CEILING_DIRECTORIES=os.path.dirname(self.path))
        argv = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", "-C", self.path, *words]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=timeout, check=False)
        except FileNotFoundError:
            raise RefusedError("no_git", "git is not installed on this machine", "install git") from None
        except subprocess.TimeoutExpired:
            raise RefusedError("git_failed", f"git {words[0]} did not end within {timeout:g} s", "run again") from None
        if done.returncode not in ok:
            tail = " ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
            raise RefusedError("git_failed", f"git {words[0]} in {self.path}: {tail}")
        return done.stdout.strip()

    def begin(self) -> None:
        """Make the directory, or take up the one that an earlier run began.

        :raises RefusedError: ``foreign_checkout``.
        """
        mark = os.path.join(self.path, ".git", MARKER)
        if os.path.isfile(mark):
            with open(mark, encoding="utf-8") as handle:
                if handle.read().strip() == self.engine:
                    return
        elif not os.path.isdir(self.path) or not os.listdir(self.path):
            os.makedirs(self.path, exist_ok=True)
            self.git("init", "--quiet")
            with open(mark, "w", encoding="utf-8") as handle:
                handle.write(self.engine + "\n")
            return
        raise RefusedError(
            "foreign_checkout",
            f"{self.path} was not made for engine {self.engine} by this project",
            "move it away; it was left as it is",
        )

    def has(self, commit: str) -> bool:
        """Whether the commit and all that it needs are here; a fetch that was cut off leaves nothing behind."""
        with contextlib.suppress(RefusedError):
            self.git("cat-file", "-e", commit + "^{commit}")
            return True
        return False

    def fetch_base(self, repository: str, base: Mapping[str, str]) -> None:
        """Fetch one commit without its history: by its hash, or by the tag where a server gives only names.

        :raises RefusedError: ``base_unreachable``; ``base_differs`` when the tag is another commit.
        """
        commit, tag = base["commit"], base.get("tag")
        if self.has(commit):
            return
        try:
            self.git("fetch", "--quiet", "--no-tags", "--depth", "1", repository, commit, timeout=FETCH_TIMEOUT_S)
        except RefusedError as error:
            if not tag:
                raise self._unreachable(repository, error) from None
            try:
                self.git(
                    "fetch",
                    "--quiet",
                    "--no-tags",
                    "--depth",
                    "1",
                    repository,
                    "refs/tags/" + tag,
                    timeout=FETCH_TIMEOUT_S,
                )
            except RefusedError as second:
                raise self._unreachable(repository, second) from None
        if not self.has(commit):
            found = self.git("rev-parse", "FETCH_HEAD^{commit}")
            raise RefusedError(
                "base_differs", f"{repository}: {tag} is commit {found}, expected {commit}", "correct the mirror"
            )

    @staticmethod
    def _unreachable(repository: str, error: RefusedError) -> RefusedError:
        return RefusedError(
            "base_unreachable", f"the base commit cannot be fetched from {repository}: {error.message}",
            "name a mirror that has it: engine_mirror",
        )  # fmt: skip

    def fetch_bundle(self, bundle: str, ref: str, commit: str) -> None:
        """Take the commit out of a verified bundle.

        :raises RefusedError: ``bundle_differs``.
        """
        if self.has(commit):
            return
        self.git("fetch", "--quiet", "--no-tags", bundle, f"+{ref}:refs/heads/vllm-fleet", timeout=FETCH_TIMEOUT_S)
        if not self.has(commit):
            found = self.git("rev-parse", "refs/heads/vllm-fleet")
            raise RefusedError("bundle_differs", f"{bundle}: {ref} is commit {found}, expected {commit}")

    def modified(self) -> List[str]:
        """Return the tracked files that differ from the index."""
        return self.git("diff", "--name-only", ok=(0,)).splitlines()

    def check_out(self, commit: str, patches: Sequence[str] = ()) -> None:
        """Check the commit out and apply patches to it.

        :raises RefusedError: ``modified_files`` when somebody edited the checkout; ``patch_failed``.
        """
        head = self.git("rev-parse", "--quiet", "--verify", "HEAD", ok=(0, 1))
        if head:
            self._refuse_modified()
        if head != commit or patches:
            # --force: the index of an earlier, interrupted run of ours; edits were refused just now
            self.git("checkout", "--quiet", "--force", "--detach", commit)
        for patch in patches:
            try:
                self.git("apply", "--index", "--whitespace=nowarn", patch)
            except RefusedError as error:
                raise RefusedError("patch_failed", f"{patch} does not apply: {error.message}") from None

    def _refuse_modified(self) -> None:
        names = self.modified()
        if names:
            shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            raise RefusedError(
                "modified_files", f"{self.path}: tracked files are modified: {shown}", "delete the directory, run again"
            )

    def assert_tree(self, commit: str, tree: str) -> None:
        """Compare what is checked out with the pins.

        :raises RefusedError: ``commit_differs``, ``tree_differs`` or ``modified_files``.
        """
        head = self.git("rev-parse", "HEAD")
        if head != commit:
            raise RefusedError("commit_differs", f"{self.path} is at commit {head}, expected {commit}")
        found = self.git("write-tree")
        if found != tree:
            raise RefusedError("tree_differs", f"{self.path} holds tree {found}, expected {tree}")
        self._refuse_modified()

    def pack(self, target: tarfile.TarFile, prefix: str) -> int:
        """Add the tracked files to a tar, the same bytes for the same tree; return how many."""
        names = sorted(name for name in self.git("ls-files", "-z").split("\0") if name)
        for name in names:
            entry = target.gettarinfo(os.path.join(self.path, name), os.path.join(prefix, name))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            entry.mtime = 0
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            if entry.isreg():
                with open(os.path.join(self.path, name), "rb") as handle:
                    target.addfile(entry, handle)
            else:
                target.addfile(entry)
        return len(names)


def prepare(path: str, engine: str, install: Mapping[str, Any], files: Mapping[str, str], mirror: str = "") -> Checkout:
    """Bring the checkout to the pinned tree; what is there already is not fetched again.

    :param install: the ``install`` section of a git-route entry.
    :param files: verified local path of the bundle and of each patch, by file name.
    :param mirror: repository to fetch from instead of the entry's.
    :raises RefusedError: as the steps of :class:`Checkout`.
    """
    checkout = Checkout(path, engine)
    checkout.begin()
    checkout.fetch_base(mirror or install["repository"], install["base"])
    commit: str = install["base"]["commit"]
    patches: List[str] = []
    if install.get("bundle"):
        commit = install["commit"]
        checkout.fetch_bundle(files[install["bundle"]["file"]], install["bundle"]["ref"], commit)
    else:
        patches = [files[item["file"]] for item in install["patches"]]
    checkout.check_out(commit, patches)
    checkout.assert_tree(commit, install["tree"])
    return checkout


def described(install: Mapping[str, Any]) -> Dict[str, Any]:
    """Return what a manifest says about the source."""
    made: Dict[str, Any] = {
        "repository": install["repository"],
        "base": install["base"]["commit"],
        "tree": install["tree"],
    }
    if install.get("bundle"):
        made.update(commit=install["commit"], bundle_sha256=install["bundle"]["sha256"])
    else:
        made["patches_sha256"] = [item["sha256"] for item in install["patches"]]
    return made
