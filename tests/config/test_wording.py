"""Numbers agree with their nouns."""

from flowrl.wording import counted


def test_one_is_singular_and_all_else_plural():
    assert counted(1, "device") == "1 device"
    assert counted(0, "device") == "0 devices"
    assert counted(1024, "device") == "1024 devices"
    assert counted(1.0, "token") == "1 token"
    assert counted(2.5, "token") == "2.5 tokens"
    assert counted(1, "number of devices", "numbers of devices") == "1 number of devices"
    assert counted(2, "number of devices", "numbers of devices") == "2 numbers of devices"
