"""The experiment of yaml/mnist_distarray_convnet.yaml as a script, for one rank or, under mpirun, several.

python examples/mnist_script.py [FOLDER OF THE FULL MNIST SET]
mpirun -n 4 python examples/mnist_script.py
"""

import sys

import neondist as nd

dataset = nd.MNIST(path=sys.argv[1] if len(sys.argv) > 1 else None)  # None: the embedded digits
model = nd.ConvnetDist(
    [
        nd.ConvLayerDist(16, kernel_size=5, padding=2, activation=nd.ReLU()),
        nd.MaxPoolingLayerDist(2),
        nd.ConvLayerDist(32, kernel_size=5, padding=2, activation=nd.ReLU()),
        nd.MaxPoolingLayerDist(2),
        nd.DropoutLayerDist(rate=0.4),
        nd.FCLayerDist(10),
    ],
    cost=nd.CrossEntropy(),
    optimizer=nd.SGD(learning_rate=0.05, momentum=0.9, schedule=nd.CosineDecay(epochs=6)),
    seed=1,
)
experiment = nd.FitExperiment(dataset, model, batch_size=128, epochs=6)
experiment.run(output="runs/mnist_script", overwrite=True)
