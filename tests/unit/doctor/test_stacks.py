"""Reading what faulthandler has written."""

from lockstep.doctor.stacks import read_main_stack, user_frame

WRITTEN = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 975 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/a b/train.py", line 31 in hook
  File "/home/a b/train.py", line 40 in <module>
"""


def test_the_main_thread_is_the_last_one() -> None:
    stack = read_main_stack(WRITTEN)
    assert [frame.line for frame in stack] == ["171", "31", "40"]


def test_the_users_line_is_the_innermost_outside_libraries() -> None:
    frame = user_frame(read_main_stack(WRITTEN), libraries=("/usr/lib/python3.11",))
    assert str(frame) == "/home/a b/train.py:31 in hook"
    assert user_frame([], libraries=()) is None
