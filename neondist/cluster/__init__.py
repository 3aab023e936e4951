"""Machines and roles of a job.

`resources`: nodes, devices and SSH settings, from a file. `task_spec`: the role of a process, from the environment.
`hosts`: lists of hosts that may change. `preflight`: checks of nodes. `ssh_config`: connections. `submit`: schedulers.
"""

from .resources import Device, Node, ResourceSpec, SSHConfig
from .task_spec import TaskSpec, TaskSpecDef

__all__ = ["Device", "Node", "ResourceSpec", "SSHConfig", "TaskSpec", "TaskSpecDef"]
