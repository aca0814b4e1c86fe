#include "blockcp/engine/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

#include "blockcp/base/error.h"
#include "blockcp/transport/threads/threads.h"

namespace blockcp {
namespace {

using testing::Each;
using testing::HasSubstr;

CallRecord record() {
  return {.call = 7,
          .phase = Phase::forward,
          .origin = {.documents = 0x9f2c, .layout = 0x1a, .spans = 0xb, .mask = "causal, window 4"},
          .path = Path::halo,
          .shape = {DType::f32, 8, 2, 128, 64},
          .batch = 1,
          .local_rows = 16,
          .scale = 0.125,
          .needs_grad = 7,
          .kernel = "reference"};
}

// What each of `world` ranks throws, and whether the group still works afterwards.
std::vector<std::string> errors(int world, ErrorKind kind, const std::function<void(Transport&)>& act) {
  std::vector<std::string> messages(static_cast<size_t>(world), "nothing was thrown");
  run_ranks(world, [&](Transport& transport) {
    try {
      act(transport);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      messages[static_cast<size_t>(transport.rank())] = error.what();
    }
    agree(transport, record());
  });
  return messages;
}

std::vector<std::string> errors_of_change(const std::function<void(CallRecord&)>& change) {
  return errors(4, ErrorKind::argument, [&](Transport& transport) {
    CallRecord mine = record();
    if (transport.rank() == 3) change(mine);
    agree(transport, mine);
  });
}

TEST(Agreement, equal_records_pass) {
  for (int world : {1, 2, 5})
    EXPECT_THAT(errors(world, ErrorKind::argument, [](Transport& transport) { agree(transport, record()); }),
                Each("nothing was thrown"));
}

TEST(Agreement, every_field_has_its_own_message_with_both_values_on_every_rank) {
  struct {
    std::function<void(CallRecord&)> change;
    const char* message;
  } const cases[] = {
      {[](CallRecord& r) { r.call = 8; }, "same order, but rank 3 differs from rank 0 (call 8 vs call 7)."},
      {[](CallRecord& r) { r.phase = Phase::backward; },
       "same direction, but rank 3 differs from rank 0 (backward vs forward)."},
      {[](CallRecord& r) { r.origin.documents = 0x71aa; },
       "[agreement] all ranks must hold the same documents, but rank 3 differs from rank 0 (fingerprint "
       "00000000000071aa "
       "vs fingerprint 0000000000009f2c). Broadcast doc_ids before planning"},
      {[](CallRecord& r) { r.origin.layout = 0x1b; },
       "cut the rows alike, but rank 3 differs from rank 0 (fingerprint 000000000000001b vs"},
      {[](CallRecord& r) { r.origin.mask = "both ways", r.path = Path::ring; },
       "use the same mask, but rank 3 differs from rank 0 (both ways vs causal, window 4)."},
      {[](CallRecord& r) { r.origin.spans = 0xc; },
       "hold the same spans, but rank 3 differs from rank 0 (fingerprint 000000000000000c vs"},
      {[](CallRecord& r) { r.path = Path::ring; },
       "use the same exchange, but rank 3 differs from rank 0 (ring vs halo)."},
      {[](CallRecord& r) { r.shape.q_heads = 4; },
       "(4 query heads, 2 KV heads, head_dim 128, value width 64 vs 8 query"},
      {[](CallRecord& r) { r.shape.kv_heads = 4; }, "(8 query heads, 4 KV heads,"},
      {[](CallRecord& r) { r.shape.head_dim = 96; }, "head_dim 96, value width 64 vs"},
      {[](CallRecord& r) { r.shape.value_dim = 96; }, "head_dim 128, value width 96 vs"},
      {[](CallRecord& r) { r.shape.dtype = DType::bf16; },
       "same dtype, but rank 3 differs from rank 0 (bf16 vs fp32)."},
      {[](CallRecord& r) { r.batch = 2; }, "(batch 2 of 16 rows vs batch 1 of 16 rows)"},
      {[](CallRecord& r) { r.local_rows = 17; }, "(batch 1 of 17 rows vs batch 1 of 16 rows)"},
      {[](CallRecord& r) { r.scale = 1; }, "(scale 1 vs scale 0.125)"},
      {[](CallRecord& r) { r.needs_grad = 4; },
       "gradients of the same inputs, but rank 3 differs from rank 0 (v vs q, k, v)."},
      {[](CallRecord& r) { r.kernel = "cpu_avx2"; },
       "same kernel, but rank 3 differs from rank 0 (cpu_avx2 vs reference)."},
  };
  for (const auto& [change, message] : cases) EXPECT_THAT(errors_of_change(change), Each(HasSubstr(message)));
}

TEST(Agreement, scales_that_differ_in_the_last_bit_differ) {
  EXPECT_THAT(errors_of_change([](CallRecord& r) { r.scale = std::nextafter(0.125, 1); }),
              Each(HasSubstr("same scale")));
}

TEST(Agreement, the_trouble_of_the_lowest_troubled_rank_is_thrown_everywhere_before_differences) {
  const auto messages = errors(4, ErrorKind::argument, [](Transport& transport) {
    CallRecord mine = record();
    if (transport.rank() == 0) mine.origin.documents = 1;
    if (transport.rank() >= 2) mine.trouble = fmt::format("[torch] rank {} has a bad q.", transport.rank());
    agree(transport, mine);
  });
  EXPECT_THAT(messages, Each("[torch] rank 2 has a bad q. (rank 2 of 4)"));
}

TEST(Agreement, trouble_keeps_its_kind_and_any_length) {
  const auto messages = errors(2, ErrorKind::system, [](Transport& transport) {
    CallRecord mine = record();
    if (transport.rank() == 1) mine.trouble = "[engine] " + std::string(5000, 'x');
    mine.trouble_is_argument = false;
    agree(transport, mine);
  });
  EXPECT_THAT(messages, Each(HasSubstr("[engine] xxx")));
  EXPECT_THAT(messages, Each(HasSubstr("(rank 1 of 2)")));
}

TEST(Agreement, one_rank_throws_its_own_trouble) {
  const auto messages = errors(1, ErrorKind::argument, [](Transport& transport) {
    CallRecord mine = record();
    mine.trouble = "[torch] bad q.";
    agree(transport, mine);
  });
  EXPECT_THAT(messages, Each("[torch] bad q."));
}

TEST(Agreement, a_failure_at_the_end_is_thrown_by_all_ranks_and_names_the_rank) {
  const auto messages = errors(3, ErrorKind::system, [](Transport& transport) {
    std::exception_ptr failure;
    if (transport.rank() == 1) failure = std::make_exception_ptr(std::runtime_error("out of luck"));
    agree_finished(transport, failure);
  });
  EXPECT_THAT(messages, Each(HasSubstr("it failed on rank 1 of 3 (out of luck)")));
  EXPECT_THAT(errors(3, ErrorKind::system, [](Transport& transport) { agree_finished(transport, nullptr); }),
              Each("nothing was thrown"));
}

TEST(Agreement, one_rank_rethrows_its_own_failure) {
  run_ranks(1, [](Transport& transport) {
    EXPECT_THROW(agree_finished(transport, std::make_exception_ptr(std::out_of_range("x"))), std::out_of_range);
    EXPECT_NO_THROW(agree_finished(transport, nullptr));
  });
}

}  // namespace
}  // namespace blockcp
