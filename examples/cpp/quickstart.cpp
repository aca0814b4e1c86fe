// Four ranks, here threads, attend over three packed documents; each holds 16 of the 64 rows.
#include <cstdio>

#include "blockcp/blockcp.h"
using namespace blockcp;

int main() {
  run_ranks(4, [](Transport& transport) {
    const Plan plan(Packing::from_lengths({{30, 8, 20}}, 64), {.world = 4, .rank = transport.rank()});
    const AttentionShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 32, .value_dim = 32};
    const int64_t rows = plan.local_rows();
    std::vector<float> q(4 * rows * 32, 1), k(2 * rows * 32, 1), v(k), out(q.size()), lse(4 * rows);
    const auto threads = make_serial();
    // A batch of one sequence; scores are multiplied with 0.177, which is 32 ** -0.5.
    forward({plan.entry().schedule, shape, 1, rows, 0.177, select_kernel(shape, detect_machine()), transport, *threads},
            contiguous(shape, rows, q.data(), k.data(), v.data(), out.data(), lse.data()));
    std::printf("rank %d received %ld bytes, out %g\n", transport.rank(), long{transport.bytes_received()}, out[0]);
  });
}
