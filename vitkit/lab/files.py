"""Files written whole: beside, then renamed. Neither a crash nor a full disk leaves half of one, or an empty one."""

import errno
import os
import secrets
from pathlib import Path

NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)  # of file systems without hard links


def write_whole(path, content: bytes) -> None:
    """`path` holds `content`, or as before what it held. OSError of one line that names the file."""
    _write(Path(path), content, os.replace)


def create_whole(path, content: bytes) -> bool:
    """As `write_whole`, for a file that is not there; False, and nothing done, where it is by then."""
    try:
        _write(Path(path), content, _link)
    except FileExistsError:
        return False
    return True


def cannot_write(path, error: OSError) -> OSError:
    """An error of one line that names the file; its kind and number stay."""
    said = type(error)(f"{path}: cannot be written ({error.strerror or error}); what stood there before is kept")
    said.errno = error.errno
    return said


def _write(path, content, put):
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        put(part, path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        part.unlink(missing_ok=True)


def _link(part, path):
    """Unlike a rename it never takes the place of a file that another process has made meanwhile."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "File exists") from None
        os.replace(part, path)
