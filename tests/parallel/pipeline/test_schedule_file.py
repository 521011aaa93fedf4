"""Claims about the file of a schedule, byte by byte: what is written, and what is read of other programs' files."""

import pytest
from schedule_cases import schedule

from minipar.errors import UsageError
from minipar.parallel.pipeline.schedule_file import load_csv, save_csv
from minipar.parallel.pipeline.schedules import make

ONE_F_ONE_B = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


def test_lines_end_as_pytorch_ends_them(tmp_path):
    path = tmp_path / "a.csv"
    save_csv(make("1f1b", 2, 2), path)
    assert path.read_bytes() == ONE_F_ONE_B.encode()
    mine = schedule("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    save_csv(mine, path)
    assert path.read_bytes() == b"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("begins", [b"", b"\xef\xbb\xbf"])
def test_a_spreadsheets_file_is_read(begins, ends, tmp_path):
    """The file may have a byte order mark, the line ends of any system, and blank lines at its end."""
    path = tmp_path / "mine.csv"
    path.write_bytes(begins + (ONE_F_ONE_B + "\n\n").replace("\n", ends).encode())
    loaded = load_csv(path)
    assert (loaded.name, loaded.ranks) == ("mine", make("1f1b", 2, 2).ranks)


def test_an_error_shows_the_cell_as_it_stands_in_the_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b'0F0,"0B\r\n0"\n')
    with pytest.raises(UsageError) as refused:
        load_csv(path)
    assert str(refused.value).startswith(f"schedule {path}, rank 0, cell 2: unknown action '0B\\r\\n0': expected stage")


def test_fsdps_actions_are_left_out_and_nothing_else(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD,1UNSHARD0\n")
    assert load_csv(path).ranks == schedule("0F0 0B0").ranks
    path.write_text("0UNSHARD,,\n")
    with pytest.raises(UsageError, match=f"^schedule {path} holds no actions$"):
        load_csv(path)
