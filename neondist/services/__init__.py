"""Services of a job whose workers come and go: the queue of tasks."""

from .queue import WAIT, Task, TaskQueue

__all__ = ["WAIT", "Task", "TaskQueue"]
