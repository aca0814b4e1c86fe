#include "blockcp/schedule/schedule.h"

#include "blockcp/base/error.h"

namespace blockcp {
namespace {

std::vector<Move> mapped(const std::vector<Move>& moves, const std::vector<BufferId>& to) {
  std::vector<Move> out = moves;
  for (Move& move : out) {
    for (Piece& piece : move.rows) piece.buffer = to[piece.buffer];
  }
  return out;
}

int64_t rows_moved(const std::vector<Step>& steps, Role role, std::vector<Move> Transfer::*moves) {
  int64_t sum = 0;
  for (const Step& step : steps) {
    for (const Transfer& transfer : step.starts) {
      if (transfer.role != role) continue;
      for (const Move& move : transfer.*moves) sum += rows(move);
    }
  }
  return sum;
}

}  // namespace

std::string_view name(Path path) {
  constexpr std::string_view names[] = {"allgather", "halo", "a2a", "ring"};
  return names[static_cast<int>(path)];
}

Path parse_path(std::string_view text) {
  for (Path path : kPaths) {
    if (name(path) == text) return path;
  }
  fail_argument("[plan] exchange must be auto, allgather, halo, a2a or ring, but it is '{}'.", text);
}

Transfer adjoint(const Transfer& transfer, const std::vector<BufferId>& to) {
  return {Role::dkv, Combine::add, mapped(transfer.recv, to), mapped(transfer.send, to)};
}

int64_t rows(const Move& move) {
  int64_t sum = 0;
  for (const Piece& piece : move.rows) sum += piece.count;
  return sum;
}

int64_t rows_sent(const std::vector<Step>& steps, Role role) { return rows_moved(steps, role, &Transfer::send); }

int64_t rows_received(const std::vector<Step>& steps, Role role) { return rows_moved(steps, role, &Transfer::recv); }

}  // namespace blockcp
