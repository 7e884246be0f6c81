"""Files that are written whole or not at all."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

from shadowkv_lab.errors import CannotWrite


@contextmanager
def replacing(path: Path):
    """A binary file under a temporary name beside `path`, renamed to it if all went well.

    Whatever goes wrong, also an interrupt, the old file stays and no half file remains. Raises
    `CannotWrite`.
    """
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".partial", dir=path.parent
        )
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600; what is written is for colleagues
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise CannotWrite(
            f"{path} could not be written whole ({error.strerror})",
            remedy="Free some disk space; the file that was there before is untouched",
        ) from error
    except BaseException:
        os.unlink(temporary)
        raise


def ready(path: str | Path) -> Path:
    """A path to write to, its folder made if need be; for a look before long work.

    Raises `CannotWrite` for a folder, and where no file can be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CannotWrite(
            f"{path} cannot be written ({error.strerror})",
            "",
            "Name a file in a folder that you may write to",
        ) from None
    if path.is_dir():
        raise CannotWrite(f"{path} is a folder", "the name of a file")
    return path
