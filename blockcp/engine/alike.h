// What ranks gathered before they act: is a rank in trouble, and do all mean the same?
//
// A record travels as bytes: trivially copyable, all of it set, with
//   bool troubled, argument; char trouble[N];    an error that this rank found by itself, and whether the caller can
//                                                mend it
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "blockcp/base/error.h"

namespace blockcp {

// What all ranks must have in common: a clause that says it, a rank's value in words, and the cure.
template <class Record>
struct Field {
  const char* what;
  std::string (*text)(const Record&);
  const char* cure;
};

// Text as part of a record, cut to fit, the rest of `to` zero.
template <size_t N>
void put(char (&to)[N], std::string_view text) {
  std::memset(to, 0, N);
  std::memcpy(to, text.data(), std::min(text.size(), N - 1));
}

template <class Record>
void put_trouble(Record& record, std::string_view trouble, bool is_argument) {
  record.troubled = !trouble.empty();
  record.argument = is_argument;
  put(record.trouble, trouble);
}

// Throws the trouble of the lowest rank that has any, and names the rank where there are several.
template <class Record>
void check_untroubled(std::span<const Record> of_ranks) {
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const Record& record = of_ranks[rank];
    if (!record.troubled) continue;
    const std::string where = of_ranks.size() == 1 ? "" : fmt::format(" (rank {} of {})", rank, of_ranks.size());
    throw Error(record.argument ? ErrorKind::argument : ErrorKind::system, record.trouble + where);
  }
}

// Throws Error(argument) for the first field in which a rank differs from rank 0.
template <class Record>
void check_alike(std::span<const Record> of_ranks, std::span<const Field<Record>> fields) {
  for (const Field<Record>& field : fields)
    for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
      const std::string theirs = field.text(of_ranks[rank]), first = field.text(of_ranks[0]);
      check_argument(theirs == first, "[agreement] all ranks must {}, but rank {} differs from rank 0 ({} vs {}). {}",
                     field.what, rank, theirs, first, field.cure);
    }
}

}  // namespace blockcp
