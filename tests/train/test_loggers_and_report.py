"""Loggers and the HTML report of a run."""

import re
from html.parser import HTMLParser

import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.config import dump
from neondist.errors import ConfigError, MissingPackageError
from neondist.io.run_event_log import RunEventLog
from neondist.train.callbacks import loggers as module
from neondist.train.callbacks.loggers import finite_numbers
from neondist.train.state import EpochRecord


def make_experiment(loggers=(), epochs=2):
    data = nd.Synthetic((5, 6, 1), classes=3, train=8, test=6, validation=4)
    model = nd.ConvnetDist([nd.FCLayerDist(3)], dtype="float64", backend="numpy")
    metrics = [nd.ConfusionMatrix(), nd.IoU()]
    return nd.FitExperiment(data, model, batch_size=4, epochs=epochs, metrics=metrics, loggers=list(loggers))


def train(folder, logger=None, epochs=2, **options):
    def job(comm):
        experiment = make_experiment([logger()] if logger else [], epochs)
        return experiment.run(experiment.open_grid(comm), output=folder, hooks=[], **options).history

    return loopback.run(2, job)[0]


def test_scalars_of_a_record():
    record = EpochRecord({"epoch": 1, "a": 1.5, "b": None, "c": [1, float("nan")], "d": [[1, 2], [3, 4]], "stage": "x"})
    record["job"] = {"workers": 2, "server_versions": [7]}
    expected = [("a", 1.5), ("c/0", 1), ("d/0/0", 1), ("d/0/1", 2), ("d/1/0", 3), ("d/1/1", 4)]
    expected += [("job/workers", 2), ("job/server_versions/0", 7)]
    assert list(finite_numbers(record)) == expected


def test_tensorboard_has_all_epochs(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - the package is complete

    train(tmp_path, nd.TensorBoard)
    history = train(tmp_path, nd.TensorBoard, 3, resume=True)
    scalars = {}
    for file in sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content, at = file.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + size])
            scalars |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            at += size + 16
    for record in history:
        assert scalars["test_loss", record["epoch"]] == pytest.approx(record["test_loss"], rel=1e-6)
        assert ("confusion_matrix/2/2", record["epoch"]) in scalars


def test_mlflow_has_all_epochs(tmp_path, monkeypatch):
    written, ended, parameters = [], [], {}

    class FakeMlflowClient:
        def __init__(self, tracking_uri):
            assert tracking_uri == f"sqlite:///{(tmp_path / 'mlflow').resolve()}/mlflow.db"

        def create_run(self, experiment, run_name):
            return type("Run", (), {"info": type("Info", (), {"run_id": "7"})})

        def log_param(self, number, name, value):
            parameters[name] = value

        def log_metric(self, number, name, value, step):
            written.append((number, name, step))

        def set_terminated(self, number):
            ended.append(number)

    monkeypatch.setattr(module, "import_module", lambda name: type("Package", (), {"MlflowClient": FakeMlflowClient}))
    train(tmp_path, nd.MLflow, yaml_text=dump(make_experiment()))
    assert {("7", "test_loss", 1), ("7", "validation_iou_per_class/0", 2)} <= set(written)
    assert ended == ["7"]
    assert "seed" not in parameters  # it is null
    assert parameters["epochs"] == "2"
    assert parameters["dataset.shape"] == "5, 6, 1"
    assert (parameters["model.layers.0"], parameters["model.layers.0.out_features"]) == ("FCLayerDist", "3")


def test_missing_folder_or_package_is_reported(monkeypatch):
    with pytest.raises(ConfigError, match="TensorBoard: folder: the run has no output folder"):
        nd.TensorBoard().set_run_folder(None)
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(MissingPackageError, match=r"TensorBoard needs tensorboardX: pip install 'neondist\[loggers\]'"):
        make_experiment([nd.TensorBoard()]).validate()


class PageParser(HTMLParser):
    """Parser that records open tags and the URLs of resources and links."""

    def __init__(self):
        super().__init__()
        self.open, self.urls = [], []

    def handle_starttag(self, tag, attributes):
        self.urls += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "html", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_self_contained(tmp_path, capsys):
    history = train(tmp_path)
    (tmp_path / "experiment.yaml").write_text("name: <script>")
    log = RunEventLog(tmp_path)
    log.add("start", generation=1, ranks=2, hosts={"a": 1, "b": 1})
    log.add("loss", generation=1, what="node <b> was lost", host=None)
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    page = PageParser()
    page.feed(text.replace("<polyline", "<p").replace("<circle", "<p").replace("<path", "<p").replace("/>", "></p>"))
    assert page.open == []
    assert all(url.startswith("data:image/png;base64,") for url in page.urls)
    assert "<script>" not in text
    assert f"{history[-1]['test_loss']:.5g}" in text
    for fragment in (
        "Confusion matrix, last epoch",
        "validation_<wbr>iou_<wbr>per_<wbr>class",
        "halo bytes sent",
        "figcaption><b>loss<",
        "<p class='lead'>Lowest ",
        "<div class='wide'><table>",
        "<h2>Generations",
        "hosts: a 1, b 1",
        "what: node &lt;b&gt; was lost<",
    ):
        assert fragment in text
    assert re.findall("<figcaption><b>([^<]*)<", text)[:2] == ["loss", "error"]  # before other metrics
    assert len(re.findall("<svg", text)) >= 3
    capsys.readouterr()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch"')
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    expected = "metrics.jsonl:3: is not a record (a JSON object with an integer 'epoch'); remove the line\n"
    assert expected in error
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "give a readable run folder" in capsys.readouterr().err
