// Carries out the transfers of a step: packs rows, posts the exchanges, and sums what arrives to be added.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "blockcp/engine/storage.h"

namespace blockcp {

class Courier {
 public:
  // Takes the memory that the largest of `steps` needs, so that nothing can be lacking between two transfers.
  Courier(const Call& call, const Storage& storage, const std::vector<Step>& steps);

  void post(const Step& step, const std::string& what);
  void finish();  // waits for all that was posted

 private:
  struct Flight {
    const Transfer* transfer;
    std::vector<int64_t> send_bytes, recv_bytes;  // by rank
    std::byte* arrived;
    std::unique_ptr<Pending> pending;
  };

  std::vector<int64_t> bytes_by_rank(const Transfer& transfer, const std::vector<Move>& moves) const;
  std::byte* destination(const Transfer& transfer);
  void pack(const Transfer& transfer, std::byte* to) const;
  void add(const Transfer& transfer, std::byte* arrived) const;

  const Call& call_;
  const Storage& storage_;
  Memory sends_, staging_;
  int64_t sends_used_ = 0, staging_used_ = 0;
  std::vector<std::unique_ptr<Flight>> flights_;
};

}  // namespace blockcp
