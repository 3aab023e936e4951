"""TensorLayer's tutorial on distributed training: a multilayer perceptron, 784-800-800-10, on digits, with task roles.

Start it in three shells, with the same cluster and one task each:

    CLUSTER='"cluster": {"master": ["127.0.0.1:3001"], "worker": ["127.0.0.1:3002"]}'
    TF_CONFIG="{$CLUSTER, \"task\": {\"type\": \"master\"}}" python examples/roles.py
    TF_CONFIG="{$CLUSTER, \"task\": {\"type\": \"worker\"}}" python examples/roles.py
    TF_CONFIG="{$CLUSTER, \"task\": {\"type\": \"evaluator\"}}" python examples/roles.py

Master and worker each train on a shard of the digits and sum their gradients; the evaluator evaluates each checkpoint.
Without TF_CONFIG a single process is used.

The cluster of the original tutorial has a parameter server and two asynchronous workers:

    export NEONDIST_TOKEN=...  # the secret of the job, the same in all shells
    CLUSTER='"cluster": {"ps": ["127.0.0.1:3000"], "worker": ["127.0.0.1:3001", "127.0.0.1:3002"]}'
    TF_CONFIG="{$CLUSTER, \"task\": {\"type\": \"ps\", \"index\": 0}}" python examples/roles.py
    TF_CONFIG="{$CLUSTER, \"task\": {\"type\": \"worker\", \"index\": 0}}" python examples/roles.py
    TF_CONFIG="{$CLUSTER, \"task\": {\"type\": \"worker\", \"index\": 1}}" python examples/roles.py
"""

import sys

import neondist as nd

folder = sys.argv[1] if len(sys.argv) > 1 else "ckpt"
last_step, units = (int(word) for word in (sys.argv[2:4] or (200, 800)))
batch_size = 100  # of each worker

task = nd.TaskSpec()
grid = nd.ProcessGrid(task.create_server(), replicas=None)  # on a server, create_server does not return
dataset = nd.MNIST()
if task.is_worker():
    dataset = dataset.shard(task.num_workers, task.shard_index)
dataset.open(grid)

model = nd.MLPDist(
    [
        nd.DropoutLayerDist(0.2),
        nd.FCLayerDist(units, activation=nd.ReLU()),
        nd.DropoutLayerDist(0.5),
        nd.FCLayerDist(units, activation=nd.ReLU()),
        nd.DropoutLayerDist(0.5),
        nd.FCLayerDist(10),
    ],
    cost=nd.CrossEntropy(),
    optimizer=nd.Adam(learning_rate=1e-3),
)
model.build(dataset.sample_shape, batch_size * grid.replicas, grid)

with nd.DistributedSession(
    task,
    model,
    checkpoint_dir=folder,
    hooks=[nd.StopAtStepHook(last_step)],
    save_checkpoint_steps=max(1, last_step // 4),
    log_step_count_steps=max(1, last_step // 4),
) as session:
    if task.is_evaluator():
        while not session.should_stop():
            session.run(nd.train.evaluate, model, dataset.test, batch_size, [nd.Misclassification()])
    else:
        for x, y in session.batches(dataset, batch_size * grid.replicas):
            session.run(model.train_batch, x, y, session.batch_size)  # the last batch of an epoch may be smaller
grid.close()
