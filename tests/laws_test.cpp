// The laws of schedules, on thousands of small random problems: all ranks' schedules are built and played against each
// other in one process, with row numbers instead of tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "blockcp/schedule/cost.h"
#include "blockcp/schedule/fill.h"

namespace blockcp {
namespace {

// A packing with its ids, kept beside it so that what is allowed can be said without asking the library.
struct World {
  int64_t batch, rows;
  int world;
  std::vector<int64_t> ids;
  Mask mask;
  int64_t left, right;  // of the window; huge where unbounded

  bool allowed(int64_t b, int64_t i, int64_t j) const {
    const auto id = [&](int64_t row) { return ids[b * rows + row]; };
    const auto span = [&](int64_t row) { return mask.spans.empty() ? 0 : mask.spans[b * rows + row]; };
    if (id(i) == 0 || id(i) != id(j)) return false;
    const bool ahead = mask.causal ? j <= i : j - i <= right;
    const bool same_span = span(i) != 0 && span(i) == span(j);
    switch (mask.span_window) {
      case SpanWindow::left:
        return (ahead || same_span) && i - j <= left;
      case SpanWindow::both:
        return (ahead || (same_span && j - i <= left)) && i - j <= left;
      case SpanWindow::none:
        return (ahead && i - j <= left) || same_span;
    }
    return false;
  }
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine_); }
  int64_t value() { return std::uniform_int_distribution<int64_t>(-1000, 1000)(engine_); }

 private:
  std::mt19937_64 engine_;
};

World random_world(Random& random) {
  constexpr int worlds[] = {1, 2, 3, 4, 5, 8};
  World w;
  w.world = worlds[random.below(6)];
  w.batch = 1 + random.below(2);
  w.rows = w.world * random.below(8);
  const int64_t longest = 1 + random.below(w.rows + 1);
  for (int64_t b = 0; b < w.batch; ++b) {
    int64_t next = 1;
    for (int64_t row = 0; row < w.rows;) {
      const int64_t length = std::min(w.rows - row, 1 + random.below(longest));
      const int64_t id = random.below(4) == 0 ? 0 : next++;
      w.ids.insert(w.ids.end(), length, id);
      row += length;
    }
  }
  w.mask.causal = random.below(4) != 0;
  if (random.below(2)) w.mask.left = random.below(w.rows + 2);
  if (!w.mask.causal && random.below(2)) w.mask.right = random.below(w.rows + 2);
  w.left = w.mask.left.value_or(1 << 20);
  w.right = w.mask.right.value_or(1 << 20);
  if (random.below(2)) {
    int64_t next = 1;
    for (int64_t b = 0; b < w.batch; ++b) {
      for (int64_t row = 0; row < w.rows;) {
        const int64_t length = std::min(w.rows - row, 1 + random.below(6));
        w.mask.spans.insert(w.mask.spans.end(), length, random.below(2) ? next++ : 0);
        row += length;
      }
    }
    w.mask.span_window = static_cast<SpanWindow>(random.below(3));
  }
  return w;
}

// The ranks of a world, each with its schedule and its buffers. A kv row holds the global row that was put there; a dkv
// row holds a sum.
class Play {
 public:
  static constexpr int64_t kNothing = -1;

  Play(const World& world, Path path)
      : w(world),
        packing(Packing::from_ids(w.ids, w.batch, w.rows)),
        layout(Layout::contiguous(w.batch, w.rows, w.world)),
        bands(packing, w.mask),
        problem{packing, layout, bands, 7} {
    for (int rank = 0; rank < w.world; ++rank) schedules.push_back(build_schedule(problem, path, rank));
  }

  int64_t global(int rank, int64_t local) const {
    const int64_t length = layout.local_rows();
    return local / length * w.rows + rank * length + local % length;
  }

  void fill(std::vector<std::vector<std::vector<int64_t>>>& buffers) const {
    buffers.resize(w.world);
    for (int rank = 0; rank < w.world; ++rank) {
      for (const Buffer& buffer : schedules[rank].buffers) buffers[rank].emplace_back(buffer.rows, kNothing);
      for (size_t row = 0; row < buffers[rank][kKv].size(); ++row) buffers[rank][kKv][row] = global(rank, row);
    }
  }

  static std::vector<int64_t*> cells(std::vector<std::vector<int64_t>>& buffers, const std::vector<Piece>& pieces) {
    std::vector<int64_t*> cells;
    for (const Piece& piece : pieces) {
      for (int64_t i = 0; i < piece.count; ++i) cells.push_back(&buffers.at(piece.buffer).at(piece.row + i));
    }
    return cells;
  }

  const World& w;
  Packing packing;
  Layout layout;
  Bands bands;
  Problem problem;
  std::vector<Schedule> schedules;
};

using Buffers = std::vector<std::vector<std::vector<int64_t>>>;  // [rank][buffer][row]

const Move* find(const std::vector<Move>& moves, int peer) {
  for (const Move& move : moves) {
    if (move.peer == peer) return &move;
  }
  return nullptr;
}

std::set<std::pair<BufferId, int64_t>> touched(const std::vector<Piece>& pieces) {
  std::set<std::pair<BufferId, int64_t>> rows;
  for (const Piece& piece : pieces) {
    for (int64_t i = 0; i < piece.count; ++i) rows.emplace(piece.buffer, piece.row + i);
  }
  return rows;
}

bool disjoint(const std::set<std::pair<BufferId, int64_t>>& a, const std::set<std::pair<BufferId, int64_t>>& b) {
  return std::none_of(a.begin(), a.end(), [&](const auto& row) { return b.contains(row); });
}

// Every send has one matching receive of equal size in the same place of the schedules, and the shape rules hold.
void check_matching(const Play& play, std::vector<Step> Schedule::*steps) {
  const auto& first = play.schedules[0].*steps;
  for (int rank = 0; rank < play.w.world; ++rank) {
    const auto& mine = play.schedules[rank].*steps;
    ASSERT_EQ(mine.size(), first.size());
    for (size_t s = 0; s < mine.size(); ++s) {
      ASSERT_EQ(mine[s].starts.size(), first[s].starts.size());
      for (size_t t = 0; t < mine[s].starts.size(); ++t) {
        const Transfer& transfer = mine[s].starts[t];
        ASSERT_EQ(transfer.role, first[s].starts[t].role);
        ASSERT_EQ(transfer.combine, first[s].starts[t].combine);
        int last = -1;
        int64_t row = 0;
        for (const Move& move : transfer.send) {
          ASSERT_GT(move.peer, last);
          ASSERT_NE(move.peer, rank);
          last = move.peer;
          const Move* match = find((play.schedules[move.peer].*steps)[s].starts[t].recv, rank);
          ASSERT_NE(match, nullptr) << "rank " << rank << " sends to " << move.peer;
          ASSERT_EQ(rows(*match), rows(move));
          ASSERT_GT(rows(move), 0);
        }
        last = -1;
        for (const Move& move : transfer.recv) {
          ASSERT_GT(move.peer, last);
          last = move.peer;
          ASSERT_NE(find((play.schedules[move.peer].*steps)[s].starts[t].send, rank), nullptr);
          for (const Piece& piece : move.rows) {
            if (transfer.combine != Combine::copy) continue;
            ASSERT_EQ(piece.row, row) << "received rows lie back to back";
            ASSERT_EQ(piece.buffer, transfer.recv[0].rows[0].buffer);
            row += piece.count;
          }
        }
      }
    }
  }
}

// A receive in flight is neither read nor written, a send in flight is not written; pieces stay inside their buffers,
// and inside one sequence in the caller's.
void check_in_flight(const Play& play, std::vector<Step> Schedule::*steps) {
  const int64_t length = play.layout.local_rows();
  for (const Schedule& schedule : play.schedules) {
    for (const Step& step : schedule.*steps) {
      std::set<std::pair<BufferId, int64_t>> reads, writes, queries;
      for (const Block& block : step.blocks) {
        ASSERT_TRUE(disjoint(queries, touched({block.q}))) << "two blocks of a step share a query row";
        queries.merge(touched({block.q}));
        ASSERT_EQ(block.k.size(), block.dkv.size());
        for (size_t i = 0; i < block.k.size(); ++i) {
          ASSERT_EQ(block.k[i].count, block.dkv[i].count);
          ASSERT_EQ(block.k[i].row, block.dkv[i].row);
        }
        reads.merge(touched(block.k));
        writes.merge(touched(block.dkv));
        for (const auto& pieces : {block.k, block.dkv, std::vector{block.q, block.out, block.dq}}) {
          for (const Piece& piece : pieces) {
            ASSERT_LE(piece.row + piece.count, schedule.buffers.at(piece.buffer).rows);
            if (piece.buffer < kFirstScratch) {
              ASSERT_EQ(piece.row / length, (piece.row + piece.count - 1) / length);
            }
          }
        }
      }
      for (BufferId id : step.clear) {
        for (int64_t row = 0; row < schedule.buffers[id].rows; ++row) writes.emplace(id, row);
      }
      for (const Transfer& transfer : step.starts) {
        for (const Move& move : transfer.send) ASSERT_TRUE(disjoint(touched(move.rows), writes));
        for (const Move& move : transfer.recv) {
          if (transfer.combine == Combine::add) continue;  // lands in staging, summed after the blocks
          ASSERT_TRUE(disjoint(touched(move.rows), reads));
          ASSERT_TRUE(disjoint(touched(move.rows), writes));
          for (const Transfer& other : step.starts) {
            for (const Move& sent : other.send) ASSERT_TRUE(disjoint(touched(move.rows), touched(sent.rows)));
          }
        }
      }
    }
  }
}

// Plays the transfers of step `s`: copies at once; additions are returned and applied after the blocks.
using Additions = std::vector<std::pair<int64_t*, int64_t>>;
Additions play_transfers(const Play& play, std::vector<Step> Schedule::*steps, size_t s, Buffers& buffers) {
  Additions additions;
  std::vector<std::pair<int64_t*, int64_t>> copies;
  for (int rank = 0; rank < play.w.world; ++rank) {
    const Step& step = (play.schedules[rank].*steps)[s];
    for (size_t t = 0; t < step.starts.size(); ++t) {
      for (const Move& move : step.starts[t].recv) {
        const auto to = Play::cells(buffers[rank], move.rows);
        const auto from =
            Play::cells(buffers[move.peer], find((play.schedules[move.peer].*steps)[s].starts[t].send, rank)->rows);
        EXPECT_EQ(to.size(), from.size());
        for (size_t i = 0; i < to.size(); ++i) {
          (step.starts[t].combine == Combine::add ? additions : copies).emplace_back(to[i], *from[i]);
        }
      }
    }
  }
  for (const auto& [to, value] : copies) *to = value;
  return additions;
}

// Calls visit(q, k, dkv cell) for every pair of rows that a block computes, both as global rows.
template <class Visit>
void each_pair(const Play& play, int rank, const Block& block, Buffers& buffers, const Visit& visit) {
  const auto keys = Play::cells(buffers[rank], block.k), gradients = Play::cells(buffers[rank], block.dkv);
  const Band& band = play.schedules[rank].bands.at(block.band);
  for (int64_t i = 0; i < block.q.count; ++i) {
    const int64_t begin = std::max<int64_t>(band.begin(block.q_pos + i) - block.k_pos, 0);
    const int64_t end = std::min<int64_t>(band.end(block.q_pos + i) - block.k_pos, keys.size());
    for (int64_t j = begin; j < end; ++j) visit(play.global(rank, block.q.row + i), *keys[j], gradients[j]);
  }
}

// Forward: every allowed pair once over all ranks and steps, no other pair ever; rows without keys are idle or merge
// nothing; the scratch was filled before it is read.
void check_pairs(const Play& play) {
  Buffers buffers;
  play.fill(buffers);
  std::map<std::pair<int64_t, int64_t>, int> seen;
  std::map<int64_t, std::set<const Block*>> blocks_of_row;
  for (size_t s = 0; s < play.schedules[0].forward.size(); ++s) {
    Buffers before = buffers;  // blocks run while transfers are under way
    for (int rank = 0; rank < play.w.world; ++rank) {
      for (const Block& block : play.schedules[rank].forward[s].blocks) {
        ASSERT_GT(block.q.count, 0);
        each_pair(play, rank, block, before, [&](int64_t q, int64_t k, int64_t*) {
          ++seen[{q, k}];
          blocks_of_row[q].insert(&block);
        });
      }
    }
    play_transfers(play, &Schedule::forward, s, buffers);
  }
  for (int64_t b = 0; b < play.w.batch; ++b) {
    for (int64_t i = 0; i < play.w.rows; ++i) {
      for (int64_t j = 0; j < play.w.rows; ++j) {
        const auto at = seen.find({b * play.w.rows + i, b * play.w.rows + j});
        ASSERT_EQ(at == seen.end() ? 0 : at->second, play.w.allowed(b, i, j) ? 1 : 0)
            << "sequence " << b << ", query " << i << ", key " << j;
        if (at != seen.end()) seen.erase(at);
      }
    }
  }
  ASSERT_TRUE(seen.empty()) << "pairs across sequences";
  for (const auto& [row, blocks] : blocks_of_row) {
    if (blocks.size() > 1) {
      ASSERT_TRUE(play.schedules[0].partial) << "row " << row << " is merged";
    }
  }
}

// Every local row is in exactly one block or idle, unless the schedule merges.
void check_idle(const Play& play) {
  for (const Schedule& schedule : play.schedules) {
    std::vector<int> covered(schedule.buffers[kQ].rows, 0);
    for (const Piece& piece : schedule.idle) {
      for (int64_t i = 0; i < piece.count; ++i) ++covered[piece.row + i];
    }
    for (const Step& step : schedule.forward) {
      for (const Block& block : step.blocks) {
        for (int64_t i = 0; i < block.q.count; ++i) ++covered[block.q.row + i];
      }
    }
    for (int count : covered) {
      ASSERT_GE(count, 1);
      if (!schedule.partial) {
        ASSERT_EQ(count, 1);
      }
    }
  }
}

// Backward: with a random number for every pair (q, k), the gradient that comes home to row k is the sum over the q
// that see it: the transpose of the forward movement, and each pair once.
void check_transpose(const Play& play, Random& random) {
  Buffers buffers;
  play.fill(buffers);
  std::map<int64_t, int64_t> expected, home;
  std::map<std::pair<int64_t, int64_t>, int> seen;
  for (size_t s = 0; s < play.schedules[0].backward.size(); ++s) {
    for (int rank = 0; rank < play.w.world; ++rank) {
      for (BufferId id : play.schedules[rank].backward[s].clear)
        std::fill(buffers[rank][id].begin(), buffers[rank][id].end(), 0);
    }
    Buffers before = buffers;
    const Additions additions = play_transfers(play, &Schedule::backward, s, buffers);
    for (int rank = 0; rank < play.w.world; ++rank) {
      for (const Block& block : play.schedules[rank].backward[s].blocks) {
        const auto gradients = Play::cells(buffers[rank], block.dkv);
        std::map<int64_t*, int64_t*> now;  // cells of `before` to those of `buffers`
        const auto old = Play::cells(before[rank], block.dkv);
        for (size_t i = 0; i < old.size(); ++i) now[old[i]] = gradients[i];
        each_pair(play, rank, block, before, [&](int64_t q, int64_t k, int64_t* cell) {
          const int64_t value = random.value();
          ++seen[{q, k}];
          expected[k] += value;
          *now.at(cell) += value;
        });
      }
    }
    for (const auto& [to, value] : additions) *to += value;
  }
  for (int rank = 0; rank < play.w.world; ++rank) {
    for (size_t row = 0; row < buffers[rank][kDkv].size(); ++row) {
      ASSERT_EQ(buffers[rank][kDkv][row], expected[play.global(rank, row)]) << "rank " << rank << ", row " << row;
    }
  }
  int64_t allowed = 0;
  for (int64_t b = 0; b < play.w.batch; ++b) {
    for (int64_t i = 0; i < play.w.rows; ++i) {
      for (int64_t j = 0; j < play.w.rows; ++j) {
        allowed += play.w.allowed(b, i, j);
        if (play.w.allowed(b, i, j)) {
          ASSERT_EQ((seen[{b * play.w.rows + i, b * play.w.rows + j}]), 1);
        }
      }
    }
  }
  int64_t computed = 0;
  for (const auto& [pair, times] : seen) computed += times;
  ASSERT_EQ(computed, allowed);
}

// Rows that each rank needs and does not hold, counted from the definition.
std::vector<int64_t> fewest_rows(const World& w) {
  std::vector<int64_t> fewest(w.world, 0);
  const int64_t length = w.rows / w.world;
  for (int rank = 0; rank < w.world; ++rank) {
    for (int64_t b = 0; b < w.batch; ++b) {
      for (int64_t j = 0; j < w.rows; ++j) {
        if (j / length == rank) continue;
        bool needed = false;
        for (int64_t i = rank * length; i < (rank + 1) * length; ++i) needed |= w.allowed(b, i, j);
        fewest[rank] += needed;
      }
    }
  }
  return fewest;
}

std::string describe(const World& w) {
  return testing::PrintToString(w.ids) + " world " + std::to_string(w.world) + " batch " + std::to_string(w.batch) +
         " causal " + std::to_string(w.mask.causal) + " window " + std::to_string(w.left) + "," +
         std::to_string(w.right) + " spans " + testing::PrintToString(w.mask.spans) + " rule " +
         std::to_string(static_cast<int>(w.mask.span_window));
}

std::string path_name(const testing::TestParamInfo<Path>& path) { return std::string(name(path.param)); }

class Laws : public testing::TestWithParam<Path> {
 protected:
  // Calls check(play, random) for many fresh problems that admit the path.
  template <class Check>
  void for_random_worlds(int problems, const Check& check) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    int played = 0;
    for (int i = 0; i < problems * 20 && played < problems && !HasFatalFailure(); ++i) {
      const World w = random_world(random);
      SCOPED_TRACE(describe(w));
      const Packing packing = Packing::from_ids(w.ids, w.batch, w.rows);
      const Layout layout = Layout::contiguous(w.batch, w.rows, w.world);
      const Bands bands(packing, w.mask);
      if (!why_not(GetParam(), Problem{packing, layout, bands, {}}).empty()) continue;
      ++played;
      check(Play(w, GetParam()), random);
    }
    ASSERT_EQ(played, problems);
  }
};

TEST_P(Laws, EachSendHasOneMatchingReceive) {
  for_random_worlds(1500, [](const Play& play, Random&) {
    check_matching(play, &Schedule::forward);
    check_matching(play, &Schedule::backward);
  });
}

TEST_P(Laws, NothingInFlightIsTouched) {
  for_random_worlds(1500, [](const Play& play, Random&) {
    check_in_flight(play, &Schedule::forward);
    check_in_flight(play, &Schedule::backward);
  });
}

TEST_P(Laws, EveryAllowedPairOnceAndNoOther) {
  for_random_worlds(1500, [](const Play& play, Random&) {
    check_pairs(play);
    check_idle(play);
  });
}

TEST_P(Laws, BackwardIsTheTransposeOfForward) {
  for_random_worlds(1500, [](const Play& play, Random& random) { check_transpose(play, random); });
}

TEST_P(Laws, CountedWorkIsTheNumberOfAllowedPairs) {
  for_random_worlds(500, [](const Play& play, Random&) {
    int64_t allowed = 0;
    for (int64_t b = 0; b < play.w.batch; ++b) {
      for (int64_t i = 0; i < play.w.rows; ++i) {
        for (int64_t j = 0; j < play.w.rows; ++j) allowed += play.w.allowed(b, i, j);
      }
    }
    int64_t counted = 0;
    for (int64_t pairs : work(play.problem)) counted += pairs;
    ASSERT_EQ(counted, allowed);
  });
}

TEST_P(Laws, NeededOnlyMovesTheFewestRowsPossible) {
  if (GetParam() != Path::a2a && GetParam() != Path::halo) {
    // The other paths move at least that many.
    for_random_worlds(300, [](const Play& play, Random&) {
      const auto fewest = fewest_rows(play.w);
      for (int rank = 0; rank < play.w.world; ++rank) {
        ASSERT_GE(cost(play.problem, play.schedules[rank]).forward_received, fewest[rank]);
      }
    });
    return;
  }
  for_random_worlds(1000, [](const Play& play, Random&) {
    const auto fewest = fewest_rows(play.w);
    for (int rank = 0; rank < play.w.world; ++rank) {
      const RankCost counted = cost(play.problem, play.schedules[rank]);
      ASSERT_EQ(counted.forward_received, fewest[rank]);
      ASSERT_EQ(counted.backward_received, fewest[rank]);
      ASSERT_EQ(counted.gradient_sent, fewest[rank]);
    }
  });
}

class NeighbourLaws : public Laws {};

TEST_P(NeighbourLaws, KeysTravelBetweenNeighboursOnly) {
  for_random_worlds(300, [](const Play& play, Random&) {
    for (const Schedule& schedule : play.schedules) {
      for (const Step& step : schedule.forward) {
        for (const Transfer& transfer : step.starts) {
          for (const Move& move : transfer.send) ASSERT_EQ(std::abs(move.peer - schedule.rank), 1);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Paths, NeighbourLaws, testing::Values(Path::halo, Path::ring), path_name);
INSTANTIATE_TEST_SUITE_P(Paths, Laws, testing::ValuesIn(kPaths), path_name);

}  // namespace
}  // namespace blockcp
