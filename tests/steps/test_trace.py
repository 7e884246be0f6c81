"""Chrome traces: whose step a launch belongs to, by marks of the GPU, by calls, or by time."""

import json

import pytest

from shadowkv_lab.errors import BadFile
from shadowkv_lab.steps.trace import read_trace

COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(X)>"


def kernel(ts, dur=800.0, correlation=None, tid=7):
    args = {} if correlation is None else {"correlation": correlation}
    return dict(ph="X", cat="kernel", name=COPY, pid=0, tid=tid, ts=ts, dur=dur, args=args)


def mark(name, ts, dur=1000.0, gpu=False, tid=7):
    cat = "gpu_user_annotation" if gpu else "user_annotation"
    return dict(ph="X", cat=cat, name=name, pid=0 if gpu else 99, tid=tid, ts=ts, dur=dur)


@pytest.fixture
def trace(tmp_path):
    def write(*events):
        file = tmp_path / "t.json"
        file.write_text(json.dumps(dict(traceEvents=list(events))))
        return read_trace(file)

    return write


def test_launches_that_run_after_their_step_belong_to_the_call_that_launched_them(trace):
    """The host is a step ahead: by its time the draft's cast would be the target's."""
    call = dict(ph="X", cat="cuda_runtime", name="cudaGraphLaunch", pid=99, tid=1, ts=1100, dur=5)
    found = trace(
        mark("step[TARGET_VERIFY bs=1]", 0),
        mark("step[DRAFT_EXTEND_V2 bs=1]", 1001),
        mark("step[TARGET_VERIFY bs=1]", 2002),
        kernel(2100, 800.0, correlation=5),
        kernel(100, 500.0),
        call | {"args": {"correlation": 5}},
    )
    assert (found.steps, found.draft_steps) == (2, 1)
    assert found.casts() == {COPY: 0.5} and found.casts(of="draft") == {COPY: 0.8}


def test_the_gpu_s_own_marks_come_first(trace):
    found = trace(
        mark("step[VERIFY bs=1]", 0),
        mark("step[DRAFT bs=1]", 1001),
        mark("step[VERIFY bs=1]", 5000, gpu=True),
        mark("step[DRAFT bs=1]", 6001, gpu=True),
        kernel(5100, 800.0),
        kernel(6100, 300.0),
    )
    assert (found.steps, found.draft_steps) == (1, 1)  # a mark on the GPU is the host's again
    assert found.casts() == {COPY: 0.8} and found.casts(of="draft") == {COPY: 0.3}


def test_prefill_is_left_out_and_what_no_mark_covers_is_outside(trace):
    found = trace(
        mark("execute_context_1(512)_generation_0(0)", 0),
        mark("execute_context_0(0)_generation_3(3)", 2000),
        mark("execute_context_1(64)_generation_2(2)", 4000),
        kernel(100, 700.0),
        kernel(2100, 800.0),
        kernel(3500, 200.0),
    )
    assert (found.steps, found.left_out) == (1, {"PREFILL": 2})
    assert found.casts() == {COPY: 0.8} and found.casts(of="outside") == {COPY: 0.2}


def test_an_older_release_marks_the_draft_s_steps_as_decoding(trace):
    found = trace(
        mark("step[DECODE bs=1]", 0),
        mark("step[TARGET_VERIFY bs=1]", 2000),
        kernel(100, 100.0),
        kernel(2100, 800.0),
    )
    assert (found.steps, found.draft_steps) == (1, 1)
    assert found.casts() == {COPY: 0.8} and found.casts(of="draft") == {COPY: 0.1}


@pytest.mark.parametrize("dur", [-828.0, None, "long"])
def test_a_time_that_cannot_be_is_refused(trace, dur):
    with pytest.raises(BadFile, match=r"direct_copy_kernel_cuda.*lasts"):
        trace(mark("step[DECODE bs=1]", 0), kernel(0, dur))


@pytest.mark.parametrize("events", [{}, {"traceEvents": 1}, [], {"traceEvents": [1, None]}])
def test_what_is_no_trace(tmp_path, events):
    file = tmp_path / "t.json"
    file.write_text(json.dumps(events))
    with pytest.raises(BadFile, match=r"no trace|no GPU kernels"):
        read_trace(file)


def test_deep_nesting_is_refused(tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    with pytest.raises(BadFile):
        read_trace(file)
