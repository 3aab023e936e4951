"""Tasks as a PyTorch data set."""

import pytest
import torch

import neondist as nd
from neondist.data.records.base import BadRecordError
from neondist.services.loader import TaskDataset


def test_minibatches_are_credited_after_training(tmp_path):
    with nd.TaskQueue(tmp_path / "q", 5, 5, shuffle=False) as queue:
        data = iter(TaskDataset(queue, "a", list, 2))
        assert next(data) == [0, 1]
        assert next(data) == [2, 3]
        queue.lost("a")
        assert next(data, None) == [2, 3]  # the first minibatch alone was credited
        assert list(data) == [[4]]
        assert queue.counts()["done"] == 1


def test_bad_records_are_reported(tmp_path):
    def read(numbers):
        if 1 in numbers:
            raise BadRecordError(1, "a.csv:2: no number")
        return numbers.tolist()

    with nd.TaskQueue(tmp_path / "q", 3, 3, shuffle=False, skip_bad_records=True) as queue:
        assert list(TaskDataset(queue, "a", read, 2)) == [[0], [2]]
        assert queue.skipped == [(1, "a.csv:2: no number")]


def test_prefetching_is_rejected(tmp_path):
    with nd.TaskQueue(tmp_path / "q", 3, 3) as queue:
        data = TaskDataset(queue, "a", list, 2)
        with pytest.raises(nd.ConfigError, match="num_workers"):
            list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork"))
