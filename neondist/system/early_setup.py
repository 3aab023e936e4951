"""Early setup before slow imports: signal handlers of a command, and the heartbeat of a rank."""

import os

from .heartbeat import connect_to_supervisor
from .signals import install_command_handlers

connect_to_supervisor(os.environ)
install_command_handlers()
