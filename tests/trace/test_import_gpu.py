"""GPU traces of torch.profiler: idle time by what the host did, kernels by class, sizes of messages, old formats."""

import json
from io import StringIO

import pytest
from rich.console import Console
from trace_files import FIXTURES, NCCL, host, kernel, kineto, lanes, launch, raw

from syncline.cli.trace.gpu_tables import print_gpu
from syncline.trace import overlap
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.kernels import kernel_class, short_name
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.formats.load import import_files, load

GEMM, ADD = "sm90_xmma_gemm_bf16bf16_tn", "void at::native::vectorized_elementwise_kernel<4, AddFunctor<float> >(int)"
V100 = FIXTURES / "kineto-v100-2021.json"


def step(number, begin, length=1_000):
    return host(f"ProfilerStep#{number}", begin, begin + length, cat="user_annotation")


def runtime(name, start, end, *, tid=7, **args):
    return host(name, start, end, cat="cuda_runtime", tid=tid, **args)


def copy(name, start, end, correlation):
    return {**kernel(name, start, end, correlation), "cat": "gpu_memcpy"}


def idle_rows(path):
    """Kind, what the host did, count and microseconds, of all steps."""
    (activity,) = import_files(path).gpu.values()
    return [(row.kind, row.doing, row.count, row.ns / 1000) for row in activity.idle]


def test_a_gap_is_named_by_what_the_host_did(tmp_path):
    events = [
        step(0, 0),
        host("aten::mm", 10, 20), launch(15, 1), kernel(GEMM, 20, 100, 1),
        # Launched while the GPU was busy, 4 us late: the usual distance of two kernels.
        host("aten::add", 30, 40), launch(35, 2), kernel(ADD, 104, 150, 2),
        # 60 us late, though launched in time: it waited for something else.
        host("aten::add", 40, 50), launch(45, 3), kernel(ADD, 210, 250, 3),
        # Launched after the GPU was done, in a long operator; then after Python; then after an allocation.
        host("aten::sort", 240, 330), launch(320, 4), kernel(ADD, 330, 340, 4),
        host("aten::relu", 440, 450), launch(445, 5), kernel(ADD, 450, 500, 5),
        runtime("cudaMalloc", 505, 590), host("aten::empty", 503, 595), host("aten::mm", 600, 620), launch(610, 6),
        kernel(GEMM, 620, 700, 6), host("Optimizer.step#A.step", 640, 700),
        host("my logging", 690, 890, cat="user_annotation"), launch(880, 7), kernel(ADD, 890, 900, 7),
    ]  # fmt: skip
    assert idle_rows(kineto(tmp_path / "t.json", events)) == [
        ("host wait", "Python in 'my logging'", 1, 190.0),
        ("host wait", "Python in the forward pass", 1, 110.0),
        ("host wait", "aten::empty", 1, 120.0),
        ("host wait", "aten::sort", 1, 80.0),
        ("kernel wait", "", 1, 4.0),
        ("other wait", "", 1, 60.0),
    ]


def test_a_gap_after_a_wait_for_the_gpu_is_named_by_the_call_and_the_wait_is_counted(tmp_path):
    events = [
        step(0, 0),
        host("aten::mm", 10, 20), launch(15, 1), kernel(GEMM, 20, 300, 1),
        host("aten::item", 30, 310), runtime("cudaMemcpyAsync", 40, 60, correlation=2),
        copy("Memcpy DtoH (Device -> Pageable)", 300, 302, 2), runtime("cudaStreamSynchronize", 60, 306),
        host("aten::mm", 340, 360), launch(350, 3), kernel(GEMM, 360, 500, 3),
        # A copy of pageable memory returns when it is done, without a call that synchronises.
        host("aten::to", 370, 540), runtime("cudaMemcpyAsync", 380, 530, correlation=4),
        copy("Memcpy DtoH (Device -> Pageable)", 500, 510, 4),
        host("aten::mm", 560, 580), launch(570, 5), kernel(GEMM, 580, 600, 5),
        # The GPU is idle already: this call waits for nothing.
        runtime("cudaDeviceSynchronize", 700, 705), host("aten::mm", 740, 760), launch(750, 6),
        kernel(GEMM, 760, 770, 6),
    ]  # fmt: skip
    path = kineto(tmp_path / "t.json", events)
    assert idle_rows(path) == [
        ("host wait", "Python in the forward pass", 1, 160.0),
        ("host wait", "after aten::item (cudaStreamSynchronize)", 1, 58.0),
        ("host wait", "after aten::to (cudaMemcpyAsync)", 1, 70.0),
    ]
    (activity,) = import_files(path).gpu.values()
    # The operators as a whole: without the waits nobody needs them.
    assert [(row.doing, row.ns / 1000) for row in activity.blocked] == [
        ("aten::item (cudaStreamSynchronize)", 280.0),
        ("aten::to (cudaMemcpyAsync)", 170.0),
    ]


def test_of_an_operator_that_does_more_than_wait_only_the_wait_counts(tmp_path):
    events = [
        step(0, 0), host("aten::mm", 10, 20), launch(15, 1), kernel(GEMM, 20, 300, 1),
        host("aten::nonzero", 30, 900), runtime("cudaStreamSynchronize", 60, 306),
        launch(350, 2), kernel(GEMM, 360, 500, 2),
    ]  # fmt: skip
    (activity,) = import_files(kineto(tmp_path / "t.json", events)).gpu.values()
    (row,) = activity.blocked
    assert (row.doing, row.ns / 1000) == ("aten::nonzero (cudaStreamSynchronize)", 246.0)


def test_kernels_that_were_launched_before_the_profile_do_not_count(tmp_path):
    # The GPU is 200 us behind its host when the profiler starts: a collective and a kernel have no launch.
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    events = [
        step(0, 0), kernel(GEMM, 10, 150, 90), kernel(nccl, 20, 200, 91, stream=20),
        host("aten::mm", 15, 25), launch(20, 1), kernel(GEMM, 200, 300, 1),
        launch(30, 2), kernel(nccl, 250, 400, 2, stream=20),
    ]  # fmt: skip
    source = load(kineto(tmp_path / "t.json", events))
    assert [span.step for span in source.spans if span.lane == "exchange"] == [0]
    found = analyze(source).gpu.ranks[0]
    assert (found.compute_ms, found.communication_ms, found.whole_ms) == pytest.approx((0.1, 0.15, 0.2))


def small_loop(each, *, steps=8, length=1_000, world=1):
    """Events of `steps` steps; `each(at)` makes those of one that begins at a time."""
    events, correlation = [], iter(range(1, 100_000))
    for number in range(steps):
        at = number * length
        events.append(step(number, at, length))
        for what in each(at):
            name, launched, start, end = what[:4]
            number_of = next(correlation)
            events += [*what[4:], host(f"aten::{name}", launched - 2, launched + 2), launch(launched, number_of)]
            make = copy if name.startswith("Memcpy") else kernel
            events.append(make({"mm": GEMM}.get(name, ADD), start, end, number_of))
    return events


def test_a_gpu_that_waits_for_launches_is_host_bound(tmp_path):
    # A kernel of 20 us every 100 us: 760 of 1,000 us are idle, and the host is busy with Python and launches.
    events = small_loop(lambda at: [("mm", at + 100 * n + 20, at + 100 * n + 24, at + 100 * n + 44) for n in range(10)])
    found = analyze(load(kineto(tmp_path / "t.json", events)))
    assert found.verdict.kind == "host-bound"
    assert found.verdict.recoverable_ms == pytest.approx(0.8, rel=0.05)
    assert "Python in the forward pass" in found.verdict.sentence
    assert "unrecorded" not in found.verdict.sentence
    (gpu,) = found.gpu.ranks
    assert gpu.idle_by_kind["host wait"] == pytest.approx(0.8, rel=0.02)
    assert gpu.idle_ms == pytest.approx(gpu.whole_ms - 0.2, rel=0.01)


def test_python_between_the_update_and_the_forward_pass_is_not_called_forward(tmp_path):
    def each(at):
        ends = host("Optimizer.step#A.step", at + 985, at + 998)
        yield ("mm", at + 700, at + 704, at + 980, ends)

    found = analyze(load(kineto(tmp_path / "t.json", small_loop(each))))
    assert found.verdict.kind == "host-bound"
    assert (
        "What the host does meanwhile: Python before the forward pass 0.7 ms. It may load data"
        in found.verdict.sentence
    )


def test_a_host_that_waits_for_the_gpu_is_sync_bound(tmp_path):
    def each(at):
        for n in range(5):
            begin = at + 200 * n
            waits = [
                host("aten::item", begin + 40, begin + 150),
                runtime("cudaStreamSynchronize", begin + 42, begin + 148),
            ]
            yield ("mm", begin + 20, begin + 24, begin + 140, *waits)

    found = analyze(load(kineto(tmp_path / "t.json", small_loop(each))))
    assert found.verdict.kind == "sync-bound"
    assert "5 x aten::item (cudaStreamSynchronize)" in found.verdict.sentence
    # Without the waits the host would be 98 us earlier in each of the five rounds: the GPU's 84 us of idle time go.
    assert found.verdict.recoverable_ms == pytest.approx(0.42, rel=0.05)


def test_idle_time_while_data_are_loaded_is_input_bound(tmp_path):
    def each(at):
        loading = host("enumerate(DataLoader)#x.__next__", at + 5, at + 600, cat="user_annotation")
        yield ("mm", at + 620, at + 624, at + 980, loading)

    found = analyze(load(kineto(tmp_path / "t.json", small_loop(each))))
    assert found.verdict.kind == "input-bound"
    assert all(finding.kind not in ("host-bound", "sync-bound") for finding in found.findings)


def idle_loop(gap, *, length):
    """Kernels every `length` us, each launched in time and `gap` us after the end of the one before."""

    def each(at):
        return [
            ("mm", at + 1 + n, at + length * n + (gap if n else 10), at + length * (n + 1))
            for n in range(1_000 // length)
        ]

    return small_loop(each)


@pytest.mark.parametrize(
    ("events", "idle_ms", "why"),
    [
        (idle_loop(60, length=100), 0.54, "before kernels that were launched in time and started later"),
        (idle_loop(8, length=20), 0.392, "in short gaps between its 50 kernels"),
        (
            [one for one in idle_loop(60, length=100) if one["cat"] != "cuda_runtime"],
            0.55,
            "before kernels whose launches the trace does not show",
        ),
    ],
    ids=["launched in time", "short gaps", "no launches"],
)
def test_idle_time_that_is_not_the_host_s_is_a_cause_with_its_reason(tmp_path, events, idle_ms, why):
    found = analyze(load(kineto(tmp_path / "t.json", events)))
    assert found.verdict.kind == "gpu-idle"
    assert found.verdict.recoverable_ms == pytest.approx(idle_ms, rel=0.01)
    assert f"({found.verdict.recoverable_ms / found.step_ms['usual']:.0%}): " in found.verdict.sentence
    assert why in found.verdict.sentence
    assert sum(what in found.verdict.sentence for what in ("in time", "short gaps", "does not show")) == 1


def test_kernels_without_launches_have_the_steps_of_the_gpu_and_not_of_a_host_that_is_far_ahead(tmp_path):
    # The host has marked all of its steps before the GPU is done with the first one.
    events = [step(number, 20 * number, 20) for number in range(8)]
    for number in range(8):
        at = 10 + 1_000 * number
        events += [kernel(GEMM, at, at + 500, -1), kernel(ADD, at + 600, at + 900, -1)]
    found = analyze(load(kineto(tmp_path / "t.json", events)))
    assert found.step_ms["usual"] == pytest.approx(1.0)
    assert found.gpu.ranks[0].compute_ms == pytest.approx(0.8)
    assert any("does not show which calls launched its kernels" in note for note in found.notes)


@pytest.mark.parametrize("peers", ["in the kernels", "in the names of ranges"])
def test_stages_of_a_pipeline_that_wait_for_one_another_are_not_a_slow_network(tmp_path, peers):
    # Rank 0 computes for 400 us and sends; rank 1 has waited for that since the start of its step, and sends back.
    name, in_kernels = "ncclDevKernel_SendRecv(x)", peers == "in the kernels"

    def message(rank, number, call, start, end):
        to = {"send": "Dst Rank", "recv": "Src Rank"}[call]
        group = {"Process Group Name": "pp", "Process Group Ranks": "[0, 1]", "Group size": 2, "dtype": "Float"}
        args = {"Collective name": call, to: 1 - rank, "Seq": number, "In msg nelems": 1000, **group}
        arrow = f"{rank}->{1 - rank}" if call == "send" else f"{rank}<-{1 - rank}"
        return [
            host(f"nccl:{call}" + ("" if in_kernels else f" {arrow}"), start - 2, start, cat="user_annotation"),
            launch(start - 1, number), kernel(name, start, end, number, stream=20, **(args if in_kernels else {})),
        ]  # fmt: skip

    paths = []
    for rank in (0, 1):
        events = []
        for number in range(6):
            at, ids = 1_000 * number, iter(range(10 * number + 1, 10 * number + 9))
            computes = at + (2 if rank == 0 else 422)
            times = {"send": (402, 420), "recv": (425, 840)} if rank == 0 else {"recv": (2, 420), "send": (822, 840)}
            events.append(step(number, at))
            events += [host("aten::mm", at, at + 2), launch(at + 1, mine := next(ids))]
            events.append(kernel(GEMM, computes, computes + 400, mine))
            for call, (start, end) in times.items():
                events += message(rank, next(ids), call, at + start, at + end)
        paths.append(kineto(tmp_path / f"rank{rank}.json", events, rank=rank, world=2))
    told = analyze(load(paths))
    assert told.verdict.kind == "pipeline-bubble"
    # 400 us of each rank's 1,000, without the transfers of 18 us.
    assert told.verdict.recoverable_ms == pytest.approx(0.398, rel=0.02)
    assert told.straggler is None
    assert {exchange.name for exchange in load(paths).exchanges} == {"point-to-point"}


def test_steps_that_accumulate_gradients_are_one_step_with_the_update(tmp_path):
    # profiler.step() after each of four batches; only the fourth has an all-reduce and an update.
    events, correlation = [], iter(range(1, 1_000))

    def work(name, at, end, *, stream=7):
        number = next(correlation)
        return [launch(at, number), kernel(name, at + 1, end, number, stream=stream)]

    for batch in range(1, 26):
        at = 1_000 * batch
        events += [step(batch, at), host("aten::mm", at, at + 20), *work(GEMM, at + 5, at + 800)]
        if batch % 4 == 0:
            events += work("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", at + 700, at + 950, stream=20)
            events += [host("Optimizer.step#A.step", at + 940, at + 990), *work(ADD, at + 950, at + 1_000)]
    found = analyze(load(kineto(tmp_path / "t.json", events)))
    assert found.steps == (1, 2, 3, 4, 5, 6), "batch 25 belongs to a step that is not in the trace"
    assert found.step_ms["usual"] == pytest.approx(4, rel=0.06)
    assert found.network.messages == 1
    assert any("every 4. ProfilerStep" in note for note in found.notes)


def test_steps_that_are_left_out_are_no_idle_time_of_the_others(tmp_path):
    # Every fourth step begins with 5 ms of Python, such as a checkpoint.
    events, at = [], 0
    for number in range(16):
        pause = 5_000 if number % 4 == 3 else 0
        begin = at + pause
        events += [
            step(number, at, pause + 1_000), host("aten::mm", begin, begin + 10), launch(begin + 5, number + 1),
            kernel(GEMM, begin + 10, begin + 1_000, number + 1),
        ]  # fmt: skip
        at = begin + 1_000
    found = analyze(load(kineto(tmp_path / "t.json", events)))
    assert found.verdict.kind == "long-steps"
    assert found.verdict.recoverable_ms == pytest.approx(5 * 4 / 15, rel=0.01), "step 0 is start-up"
    (gpu,) = found.gpu.ranks
    assert gpu.idle_ms == pytest.approx(0, abs=0.02)
    assert gpu.whole_ms == pytest.approx(found.step_ms["usual"], rel=0.02)


@pytest.mark.parametrize(
    ("category", "call", "copied"),
    [
        ("cuda_driver", "cuLaunchKernelEx", "Memcpy HtoD (Pinned -> Device)"),
        ("cuda_runtime", "hipExtModuleLaunchKernel", "CopyHostToDevice"),
        ("xpu_runtime", "urEnqueueKernelLaunch", "Memcpy M2D"),
        ("xpu_driver", "zeCommandListAppendLaunchKernel", "Memcpy M2D"),
        ("privateuse1_runtime", "aclLaunch", "Memcpy HtoD"),
    ],
)
def test_gpus_of_other_makers_have_launches_and_copies_too(tmp_path, category, call, copied):
    def each(at):
        for n in range(10):
            yield ("mm", at + 100 * n + 20, at + 100 * n + 24, at + 100 * n + 44)

    events = small_loop(each)
    for event in events:
        if event["cat"] == "cuda_runtime":
            event |= {"cat": category, "name": call}
    events.append(copy(copied, 30, 40, 1))
    source = load(kineto(tmp_path / "t.json", events))
    assert {s.lane for s in source.spans if s.name.startswith("Memcpy")} == {"data"}
    assert analyze(source).verdict.kind == "host-bound"


@pytest.mark.parametrize("name", ["void symm_mem::two_shot_all_reduce_kernel<float>()", "ncclDevKernel_AllReduce(x)"])
def test_kernels_that_a_collective_launched_are_its_own_whatever_their_name(tmp_path, name):
    events, call = [], {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float"}
    for number in range(8):
        at, ids = 1_000 * number, iter(range(10 * number + 1, 10 * number + 9))
        events += [step(number, at), host("aten::mm", at, at + 10), launch(at + 1, mine := next(ids))]
        events += [kernel(GEMM, at + 2, at + 300, mine), host("c10d::allreduce_", at + 15, at + 40)]
        events += [host("record_param_comms", at + 20, at + 30, **call), launch(at + 25, mine := next(ids))]
        events += [kernel(name, at + 300, at + 1_000, mine)]
    told = analyze(load(kineto(tmp_path / "t.json", events)))
    assert told.verdict.kind == "bandwidth-bound"
    assert told.verdict.recoverable_ms == pytest.approx(0.7, rel=0.01)
    assert (told.network.messages, told.network.bytes) == (1, 4_000)
    assert "all-reduce" in {unit.name for unit in told.units}


def test_copies_hide_nothing_and_gaps_are_not_closed(tmp_path):
    events = [
        step(0, 0),
        launch(5, 1), kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 100, 200, 1, stream=20),
        host("aten::mm", 10, 30), launch(12, 2), kernel(GEMM, 100, 120, 2), launch(14, 3), kernel(GEMM, 123, 140, 3),
        host("aten::copy_", 30, 50), runtime("cudaMemcpyAsync", 40, 45, correlation=4),
        copy("Memcpy DtoD (Device -> Device)", 150, 190, 4),
    ]  # fmt: skip
    source = load(kineto(tmp_path / "t.json", events))
    # 20 + 17 of 100 us, as HTA counts: neither the gap of 3 us nor the copy is compute.
    assert overlap(source.spans) == pytest.approx(0.37)
    found = analyze(source)
    assert found.gpu.ranks[0].overlap == pytest.approx(0.37)
    assert found.gpu.ranks[0].copies_ms == pytest.approx(0.04)


@pytest.mark.parametrize("rank", [0, 1])
def test_use_of_a_real_gpu_equals_that_of_its_events(rank):
    """Against intervals of the file, counted as HTA does: only kernels that were launched in it."""
    found = analyze(load(NCCL[rank])).gpu.ranks[0]
    every = [e for e in raw(NCCL[rank])["traceEvents"] if e.get("ph") == "X"]
    launched = {e["args"]["correlation"] for e in every if e["cat"] == "cuda_runtime" and "correlation" in e["args"]}
    launched |= {e["args"]["correlation"] for e in every if e["cat"] == "cuda_driver"}
    events = [e for e in every if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert any(e["args"]["correlation"] not in launched for e in events)
    events = [e for e in events if e["args"]["correlation"] in launched]
    kinds = {"comm": [], "copies": [], "compute": []}
    for event in events:
        kind = "comm" if event["name"].startswith("nccl") else "copies" if event["cat"] != "kernel" else "compute"
        kinds[kind].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    comm, copies, compute = (_union(rows) for rows in kinds.values())
    busy = _union(comm + copies + compute)
    whole = busy[-1][1] - busy[0][0]
    assert found.communication_ms * 3 == pytest.approx(_length(comm) / 1e6, rel=0.01)
    assert found.compute_ms * 3 == pytest.approx(_length(compute) / 1e6, rel=0.01)
    assert found.idle_ms / found.whole_ms == pytest.approx(1 - _length(busy) / whole, abs=0.01)
    both = _length(comm) + _length(compute) - _length(_union(comm + compute))
    assert found.overlap == pytest.approx(both / _length(comm), abs=0.01), "within one point of HTA"


def _union(rows):
    joined = []
    for start, end in sorted(rows):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _length(rows):
    return sum(end - start for start, end in rows)


def test_kernels_and_operators_by_time_and_class():
    found = analyze(load(NCCL[0])).gpu
    first = found.kernels[0]
    assert (first.name, first.kind) == ("all-reduce", "communication")
    products = [row for row in found.kernels if row.kind == "matmul"]
    assert {row.operator for row in products} == {"aten::linear", "aten::mm"}
    assert sum(row.ms for row in found.kernels) == pytest.approx(sum(found.classes.values()))
    assert sum(row.ms for row in found.operators) == pytest.approx(sum(found.classes.values()))
    assert list(found.classes)[:2] == ["communication", "matmul"]
    assert [row.ms for row in found.operators] == sorted((row.ms for row in found.operators), reverse=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x128_64x8_2x1_v_bz_coopA_NTN", "matmul"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x32", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128> >(Flash_fwd_params)", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::Kernel::Params)", "attention"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "normalization"),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32", "convolution"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>(int)", "normalization"),
        ("triton_red_fused_sum_3", "reduction"),
        ("triton_poi_fused_relu_1", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdam>", "optimizer"),
        ("Memset (Device)", "memory"),
    ],
)
def test_class_of_a_kernel(name, kind):
    assert kernel_class(name) == kind
    assert kernel_class(name, "aten::_scaled_dot_product_cudnn_attention_backward") == "attention"
    assert "<" not in short_name(name)


def sized(tmp_path, *events):
    """The bytes of the only collective of a step with these events."""
    found = load(kineto(tmp_path / "t.json", [step(0, 0), *events, host("aten::mm", 900, 910)], world=2))
    return [span.bytes for span in found.spans if span.lane == "exchange"]


def test_sizes_come_from_the_calls_of_the_host(tmp_path):
    nccl = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
    shapes = {"Input Dims": [[1000]], "Input type": ["float"]}
    params = {"Collective name": "allreduce", "In msg nelems": 2000, "Out msg nelems": 2000, "dtype": "BFloat16"}
    reduce = [launch(20, 1), kernel(nccl, 40, 60, 1)]
    assert sized(tmp_path, *reduce) == [0]
    around = host("nccl:all_reduce", 10, 30, cat="user_annotation", **shapes)
    assert sized(tmp_path, around, *reduce) == [4000]
    assert sized(tmp_path, host("record_param_comms", 10, 30, **params), *reduce) == [4000]
    # The backend's own call, not the one around it, which also lists what is not sent.
    outer = host("c10d::allreduce_", 5, 35, **{"Input Dims": [[[1000]], [7]], "Input type": ["TensorList", "float"]})
    assert sized(tmp_path, outer, around, *reduce) == [4000]
    # Another thread launches, or the launch is not in the trace: the first call belongs to the first kernel.
    far = host("nccl:all_reduce", 10, 12, cat="user_annotation", tid=9, **shapes)
    assert sized(tmp_path, far, *reduce) == [4000]
    assert sized(tmp_path, far, kernel(nccl, 40, 60, 1), kernel(nccl, 70, 80, 2)) == [0, 0], "two kernels, one call"


def test_a_trace_of_the_first_profilers_is_read(tmp_path):
    """Categories `Operator`, `Runtime`, `Kernel`, `Memcpy`; the step is an operator; backward nodes without ranges."""
    found = import_files(V100)
    assert lanes(found.spans[0]) == [
        ("step", 0, 13144), ("data", 246, 971), ("data", 1198, 1199), ("data", 1409, 1410), ("forward", 1917, 1920),
        ("backward", 10798, 10801), ("backward", 11087, 11088), ("backward", 11667, 11670), ("backward", 12197, 12198),
        ("update", 12800, 12801), ("update", 12920, 12921), ("update", 13032, 13033), ("update", 13143, 13144),
    ]  # fmt: skip
    assert {span.step for span in found.spans[0]} == {2}
    assert found.notes == ("it holds no collectives",)
    assert {span.unit for span in found.spans[0] if span.lane == "update"} == {"aten::add_"}
    ranges = [
        {**host(name, start, end, cat="Operator"), "tid": "7"}
        for name, start, end in (("ProfilerStep#1", 0, 100), ("forward", 1, 50), ("nccl:all_reduce", 51, 60))
    ]
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": ranges}))
    assert ("forward", 1, 50) in lanes(import_files(path).spans[0])


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_tables_fit_a_terminal(width):
    shown = StringIO()
    print_gpu(Console(file=shown, width=width), analyze(load(NCCL[0])).gpu, top=3)
    text = shown.getvalue()
    assert max(len(line) for line in text.splitlines() if "by class" not in line) <= width
    assert "…" not in text
    for word in ("GPU, ms per step", "all-reduce", "aten::mm", "matmul 0.11"):
        assert word in text


def test_idle_time_survives_an_export(tmp_path):
    source = load(NCCL[0])
    write_chrome_trace(source, tmp_path / "trace.json.gz")
    again, first = analyze(tmp_path / "trace.json.gz"), analyze(source)
    assert again.gpu == first.gpu
    assert (again.verdict, again.findings) == (first.verdict, first.findings)


@pytest.mark.parametrize(
    "gpu", [None, [], {"x": {}}, {"0": 1}, {"0": {"idle": [[0, "host wait"], 3, [0, 1, 2, 3, 4, 5]]}}]
)
def test_odd_metadata_of_a_gpu_is_left_out(gpu, tmp_path):
    source = load(NCCL[0])
    odd = type(source)(source.spans, source.exchanges, {**source.metadata, "gpu": gpu}, source.notes, source.path)
    found = analyze(odd).gpu
    assert found is None or not found.gaps
