"""Machines and roles of a job.

`resources`: nodes, devices and SSH settings, from a file. `task_spec`: the role of a process, from the environment.
"""

from .resources import Device, Node, ResourceSpec, SSHConfig
from .task_spec import TaskSpec, TaskSpecDef

__all__ = ["Device", "Node", "ResourceSpec", "SSHConfig", "TaskSpec", "TaskSpecDef"]
