#include "blockcp/schedule/cost.h"

#include <algorithm>
#include <numeric>

#include "blockcp/base/error.h"
#include "blockcp/base/text.h"
#include "blockcp/schedule/frame.h"

namespace blockcp {
namespace {

int64_t pairs_of(const Problem& problem, int rank) {
  int64_t pairs = 0;
  for (const Query& query : queries_of(problem, rank)) pairs += problem.bands.pairs(query.document, query.rows);
  return pairs;
}

}  // namespace

RankCost cost(const Problem& problem, const Schedule& schedule) {
  RankCost cost;
  cost.forward_sent = rows_sent(schedule.forward, Role::kv);
  cost.forward_received = rows_received(schedule.forward, Role::kv);
  cost.backward_sent = rows_sent(schedule.backward, Role::kv);
  cost.backward_received = rows_received(schedule.backward, Role::kv);
  cost.gradient_sent = rows_sent(schedule.backward, Role::dkv);
  cost.gradient_received = rows_received(schedule.backward, Role::dkv);
  cost.pairs = pairs_of(problem, schedule.rank);
  for (const Buffer& buffer : schedule.buffers) {
    if (!buffer.callers && buffer.role == Role::kv) cost.scratch_rows += buffer.rows;
  }
  for (const Step& step : schedule.forward) cost.steps += !step.starts.empty();
  return cost;
}

int64_t forward_bytes_received(const RankCost& cost, const Shape& shape) {
  return cost.forward_received * shape.kv_row_bytes();
}

int64_t backward_bytes_received(const RankCost& cost, const Shape& shape) {
  return cost.backward_received * shape.kv_row_bytes() + cost.gradient_received * shape.dkv_row_bytes();
}

void check_countable(const Shape& shape, int64_t rows) {
  const auto row = static_cast<double>(shape.q_heads) * static_cast<double>(shape.head_dim + shape.value_dim);
  const double bytes = row * static_cast<double>(rows) * 8 * 4;  // of doubles, some of which move up to four times
  check_argument(bytes < 0x1p62, "[plan] bytes must fit into 64 bits, but {} of {}, width {} + {}, are too many.",
                 counted(rows, "row"), counted(shape.q_heads, "head"), shape.head_dim, shape.value_dim);
}

std::vector<int64_t> work(const Problem& problem) {
  std::vector<int64_t> work(problem.layout.world());
  for (int rank = 0; rank < problem.layout.world(); ++rank) work[rank] = pairs_of(problem, rank);
  return work;
}

double balance(const std::vector<int64_t>& work) {
  const int64_t sum = std::accumulate(work.begin(), work.end(), int64_t{0});
  if (sum == 0) return 1;
  return static_cast<double>(*std::max_element(work.begin(), work.end())) * static_cast<double>(work.size()) /
         static_cast<double>(sum);
}

}  // namespace blockcp
