#include "blockcp/engine/courier.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace blockcp {
namespace {

int64_t rows_of(const std::vector<Move>& moves) {
  int64_t sum = 0;
  for (const Move& move : moves) sum += rows(move);
  return sum;
}

// A run of rows of one piece, small enough to be one thread's turn, and its place among the rows of all moves.
struct Run {
  Piece piece;
  int64_t at;
};

std::vector<Run> runs_of(std::span<const Move> moves) {
  constexpr int64_t kRows = 256;
  std::vector<Run> runs;
  int64_t at = 0;
  for (const Move& move : moves)
    for (const Piece& piece : move.rows)
      for (int64_t done = 0; done < piece.count; done += kRows) {
        const int64_t count = std::min(kRows, piece.count - done);
        runs.push_back({{piece.buffer, piece.row + done, count}, at});
        at += count;
      }
  return runs;
}

// apply(element of a, element of b) over count rows, heads and columns, or over stretches of columns where both lie
// side by side.
template <class T, class Stretch>
void for_stretches(const Rows& a, const Rows& b, int64_t count, int64_t heads, int64_t width, const Stretch& apply) {
  const bool dense = a.col == 1 && b.col == 1;
  for (int64_t r = 0; r < count; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      T* x = static_cast<T*>(a.data) + r * a.row + h * a.head;
      T* y = static_cast<T*>(b.data) + r * b.row + h * b.head;
      if (dense)
        apply(x, y, width);
      else
        for (int64_t c = 0; c < width; ++c) apply(x + c * a.col, y + c * b.col, 1);
    }
}

template <class T, class Stretch>
void for_both(const AttentionShape& shape, const KvRows& a, const KvRows& b, int64_t count, const Stretch& apply) {
  for_stretches<T>(a.k, b.k, count, shape.kv_heads, shape.head_dim, apply);
  for_stretches<T>(a.v, b.v, count, shape.kv_heads, shape.value_dim, apply);
}

template <class T>
void copy_rows(const AttentionShape& shape, const KvRows& from, const KvRows& to, int64_t count) {
  for_both<T>(shape, to, from, count,
              [](T* x, const T* y, int64_t n) { std::memcpy(x, y, static_cast<size_t>(n) * sizeof(T)); });
}

template <class T>
void add_rows(const AttentionShape& shape, const KvRows& to, const KvRows& from, int64_t count) {
  for_both<T>(shape, to, from, count, [](T* x, const T* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] += y[i];
  });
}

}  // namespace

Courier::Courier(const Call& call, const Storage& storage, const std::vector<Step>& steps)
    : call_(call), storage_(storage) {
  int64_t most_sent = 0, most_staged = 0;
  for (const Step& step : steps) {
    int64_t sent = 0, staged = 0;
    for (const Transfer& transfer : step.starts) {
      const int64_t row = Storage::row_bytes(call, transfer.role);
      sent += aligned(rows_of(transfer.send) * row);
      if (transfer.combine == Combine::add) staged += aligned(rows_of(transfer.recv) * row);
    }
    most_sent = std::max(most_sent, sent);
    most_staged = std::max(most_staged, staged);
  }
  sends_ = Memory(most_sent);
  staging_ = Memory(most_staged);
}

std::vector<int64_t> Courier::bytes_by_rank(const Transfer& transfer, const std::vector<Move>& moves) const {
  std::vector<int64_t> bytes(static_cast<size_t>(call_.transport.world()));
  for (const Move& move : moves)
    bytes[static_cast<size_t>(move.peer)] = rows(move) * Storage::row_bytes(call_, transfer.role);
  return bytes;
}

// Copies arrive where they are read, sums beside it.
std::byte* Courier::destination(const Transfer& transfer) {
  const int64_t bytes = rows_of(transfer.recv) * Storage::row_bytes(call_, transfer.role);
  if (bytes == 0) return nullptr;
  if (transfer.combine == Combine::copy) return storage_.scratch(transfer.recv.front().rows.front().buffer);
  std::byte* at = staging_.data() + staging_used_;
  staging_used_ += aligned(bytes);
  return at;
}

void Courier::post(const Step& step, const std::string& what) {
  for (const Transfer& transfer : step.starts) {
    auto flight = std::make_unique<Flight>();
    flight->transfer = &transfer;
    flight->send_bytes = bytes_by_rank(transfer, transfer.send);
    flight->recv_bytes = bytes_by_rank(transfer, transfer.recv);
    flight->arrived = destination(transfer);
    std::byte* send = sends_.data() ? sends_.data() + sends_used_ : nullptr;
    sends_used_ += aligned(std::accumulate(flight->send_bytes.begin(), flight->send_bytes.end(), int64_t{0}));
    pack(transfer, send);
    flight->pending = call_.transport.exchange({send, flight->send_bytes, flight->arrived, flight->recv_bytes, what});
    flights_.push_back(std::move(flight));
  }
}

void Courier::finish() {
  for (const auto& flight : flights_) flight->pending->wait();
  for (const auto& flight : flights_)
    if (flight->transfer->combine == Combine::add) add(*flight->transfer, flight->arrived);
  flights_.clear();
  sends_used_ = staging_used_ = 0;
}

void Courier::pack(const Transfer& transfer, std::byte* to) const {
  const std::vector<Run> runs = runs_of(transfer.send);
  const DType type = Storage::type(call_, transfer.role);
  const int64_t row = Storage::row_bytes(call_, transfer.role);
  call_.parallel.run(static_cast<int64_t>(runs.size()), [&](int64_t i, int) {
    const auto& [piece, at] = runs[static_cast<size_t>(i)];
    const KvRows from = storage_.rows(piece), packed = packed_rows(call_.shape, to + at * row, type);
    switch (size_of(type)) {
      case 2:
        return copy_rows<uint16_t>(call_.shape, from, packed, piece.count);
      case 4:
        return copy_rows<uint32_t>(call_.shape, from, packed, piece.count);
      default:
        return copy_rows<uint64_t>(call_.shape, from, packed, piece.count);
    }
  });
}

// One peer after the other: several may send gradients of the same row, and the order of a sum decides its bits.
void Courier::add(const Transfer& transfer, std::byte* arrived) const {
  const DType type = Storage::type(call_, transfer.role);
  const int64_t row = Storage::row_bytes(call_, transfer.role);
  for (const Move& move : transfer.recv) {
    const std::vector<Run> runs = runs_of({&move, 1});
    call_.parallel.run(static_cast<int64_t>(runs.size()), [&](int64_t i, int) {
      const auto& [piece, at] = runs[static_cast<size_t>(i)];
      const KvRows to = storage_.rows(piece), packed = packed_rows(call_.shape, arrived + at * row, type);
      if (type == DType::f64)
        add_rows<double>(call_.shape, to, packed, piece.count);
      else
        add_rows<float>(call_.shape, to, packed, piece.count);
    });
    arrived += rows(move) * row;
  }
}

}  // namespace blockcp
