"""Services of a job whose workers come and go: the queue of tasks, parameter servers, and calls between processes."""

from .queue import WAIT, Task, TaskQueue

__all__ = ["WAIT", "Task", "TaskQueue"]
