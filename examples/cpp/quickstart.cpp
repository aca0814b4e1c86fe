// Four ranks, here threads, attend over three packed documents; each holds 16 of the 64 rows.
#include <cstdio>

#include "blockcp/engine/engine.h"
#include "blockcp/kernels/select.h"
#include "blockcp/plan/plan.h"
#include "blockcp/transport/threads/threads.h"
using namespace blockcp;

int main() {
  run_ranks(4, [](Transport& transport) {
    const Plan plan(Packing::from_lengths({{30, 8, 20}}, 64), {.world = 4, .rank = transport.rank()});
    const AttentionShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 32, .value_dim = 32};
    const int64_t rows = plan.local_rows();
    std::vector<float> q(4 * rows * 32, 1), k(2 * rows * 32, 1), v(k), out(q.size()), lse(4 * rows);
    auto tensor = [&](std::vector<float>& t, int64_t width) { return Tensor{t.data(), 0, rows * width, width}; };
    const auto threads = make_serial();
    const Kernel& kernel = select_kernel(shape, detect_machine());
    forward({plan.entry().schedule, shape, /*batch=*/1, rows, /*scale=*/0.177, kernel, transport, *threads},
            {tensor(q, 32), tensor(k, 32), tensor(v, 32), tensor(out, 32), tensor(lse, 1)});
    std::printf("rank %d received %ld bytes, out[0] = %g\n", transport.rank(), long{transport.bytes_received()},
                out[0]);
  });
}
