"""Byte ledger: agreement of ledger.jsonl with the metrics and the plan."""

from training_records import read_json_lines

from neondist import ConvLayerDist, ConvnetDist, FCLayerDist, FitExperiment, MaxPoolingLayerDist, ProcessGrid, Synthetic
from neondist.comm import loopback
from neondist.geometry import GridShape


def make_experiment(epochs=2, scheme="halo"):
    layers = [ConvLayerDist(3, 5, padding=2), MaxPoolingLayerDist(3, 2), ConvLayerDist(2, 3), FCLayerDist(4)]
    model = ConvnetDist(layers, dtype="float64", backend="numpy", scheme=scheme)
    return FitExperiment(Synthetic((13, 12, 1), train=10, test=4), model, batch_size=4, epochs=epochs)


def train(folder, ranks=6, replicas=1, resume=False, **options):
    def job(comm):
        experiment = make_experiment(**options)
        grid = ProcessGrid(comm, replicas=replicas)
        return experiment.run(grid, output=folder, resume=resume, hooks=[]).history

    history = loopback.run(ranks, job)[0]
    return history, read_json_lines(folder / "ledger.jsonl")


def sum_bytes(entries, **fields):
    return sum(e["bytes"] for e in entries if all(e[name] == value for name, value in fields.items()))


def test_ledger_agrees_with_metrics_and_plan(tmp_path):
    history, entries = train(tmp_path)
    plans = {plan.name: plan for plan in make_experiment().model.plan((13, 12, 1), GridShape(1, 3, 2))}
    for record in history:
        recorded = [entry for entry in entries if entry["epoch"] == record["epoch"]]
        assert sum_bytes(recorded, **{"pass": "training"}, kind="halo") == record["bytes_sent"] > 0
        assert sum_bytes(recorded, **{"pass": "training"}, kind="sum") == record["bytes_summed"] > 0
        for layer, plan in plans.items():
            for rank in range(6):
                sent_bytes = plan.forward_elements_sent[rank] * 8
                own_entries = [entry for entry in recorded if (entry["layer"], entry["rank"]) == (layer, rank)]
                halos = [entry for entry in own_entries if entry["kind"] == "halo"]
                assert sum_bytes(halos, **{"pass": "training"}, direction="forward") == 10 * sent_bytes
                assert sum_bytes(halos, **{"pass": "evaluation"}, direction="forward") == 4 * sent_bytes
                backward_bytes = plan.backward_elements_sent[rank] * 8 * 10 if layer != "conv1" else 0
                assert sum_bytes(halos, direction="backward") == backward_bytes
                summed_bytes = 4 * 8 * (10 + 4) if layer == "fc1" else 0
                assert sum_bytes(own_entries, kind="sum", peer="tiles") == summed_bytes


def test_messages_have_peers_and_counts(tmp_path):
    _, entries = train(tmp_path, ranks=4, replicas=2, epochs=1)
    conv = [e for e in entries if e["layer"] == "conv1" and e["pass"] == "training"]
    assert sorted((e["rank"], e["peer"]) for e in conv) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert {e["messages"] for e in conv} == {3}  # batches of 4, 4 and 2


def test_towers_send_no_halo(tmp_path):
    entries = train(tmp_path, scheme="tower", epochs=1)[1]
    assert {entry["kind"] for entry in entries} == {"sum"}
    assert {entry["layer"] for entry in entries} == {"fc1", "gradients"}


def test_resumed_run_continues_the_ledger(tmp_path):
    train(tmp_path, epochs=1)
    (tmp_path / "ledger.jsonl").open("a").write('{"epoch": 2, "ra')  # killed during a write
    _, entries = train(tmp_path, resume=True, epochs=2)
    assert sum_bytes(entries, epoch=1) == sum_bytes(entries, epoch=2) > 0
