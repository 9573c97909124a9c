"""`tailrace push`: the model of a run and its card, on the Hugging Face hub."""

import re
from pathlib import Path

from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE, verify
from tailrace.errors import ConfigError, TailraceError
from tailrace.importing import check_training
from tailrace.model_folder import check_files, is_hub_id, model_name

CARD = "README.md"
_BASE = re.compile(r'(?<="base_model_name_or_path": ")[^"]*')
REMEDIES = {
    401: "make another token at the hub, and set HF_TOKEN",
    403: "use a token that may write there, or name another repository",
    404: "use a token that may write there, or name another repository",
}
"""By the HTTP status of a refusal."""


class NotPushed(TailraceError):
    """The hub cannot be reached, or refuses a model. The message names the remedy."""


def push(run: Path, repo: str, /, *, private: bool = False, dry_run: bool = False) -> None:
    """Upload the newest model of a run with a generated model card, as one commit.

    Args:
        run: the output directory of a run.
        repo: OWNER/NAME on the hub; it is made if it does not exist.
        private: whether a new repository is private.
        dry_run: print the card, and stop.
    """
    check_training("RUN", str(run))
    from tailrace.extras.hub.card import card_of

    if not is_hub_id(repo):
        raise ConfigError("REPO", repo, "this names no repository of the hub", "write OWNER/NAME")
    folder = RunFolder(run)
    folder.check_wrote("a model", "train", "sft")
    folder.read_config()
    if not folder.model.is_dir():
        raise ConfigError("RUN", str(run), "it has no model yet", "train until its first checkpoint")
    check_files(folder.model)
    verify(folder.model, "export it again: --resume the run", is_editable=True)
    card = str(card_of(folder, repo))
    if dry_run:
        print(card, end="")
        return
    print(f"pushed    {_upload(folder.model, card, repo, private=private)}")


def _content(path: Path) -> Path | bytes:
    """The file that is uploaded. An adapter of an earlier version names its base by a path."""
    if path.name != "adapter_config.json":
        return path
    return _BASE.sub(lambda base: model_name(base[0]), path.read_text(encoding="utf-8")).encode()


def _upload(model: Path, card: str, repo: str, *, private: bool) -> str:
    """Upload the files of a folder and the card, and return the address of the commit."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if not get_token():
        problem = "the hub takes no model without a token, and there is none"
        raise ConfigError("REPO", repo, problem, "set HF_TOKEN, or run `hf auth login`")
    files = (path for path in sorted(model.rglob("*")) if path.is_file())
    added = {str(path.relative_to(model)): path for path in files if path.name != CHECKSUMS_FILE}
    operations = [CommitOperationAdd(CARD, card.encode())]
    operations += [CommitOperationAdd(name, _content(path)) for name, path in added.items() if name != CARD]
    api = HfApi(library_name="tailrace")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.create_commit(repo, operations, commit_message="Model and card of a run of tailrace")
    except Exception as why:  # of the hub, or of the HTTP library of this version of huggingface_hub
        cause = why.__cause__ if isinstance(why, RuntimeError) and why.__cause__ else why
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            said = " ".join((cause.server_message or cause.response.reason_phrase).split())
            remedy = REMEDIES.get(status, "push again later")
            raise NotPushed(f"{repo}: the hub refuses it ({status}: {said}); {remedy}") from why
        problem = f"{repo}: {constants.ENDPOINT} cannot be reached ({cause})"
        raise NotPushed(f"{problem}; check the network, HF_ENDPOINT and HF_HUB_OFFLINE") from why
    return str(commit.commit_url)
