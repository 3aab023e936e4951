"""Services of elastic jobs: the queue of tasks, parameter servers, and remote calls between processes."""

from .queue import WAIT, Task, TaskQueue

__all__ = ["WAIT", "Task", "TaskQueue"]
