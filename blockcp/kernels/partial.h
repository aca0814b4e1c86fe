// Results over some of a row's keys, and how two of them become one.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace blockcp {

// What one row and head has seen so far: out = sum_j exp(s_j - lse) v_j. Having seen no key is out = 0, lse = -inf.
template <class T>
struct Partial {
  static constexpr T kNothing = -std::numeric_limits<T>::infinity();

  std::span<T> out;
  T lse = kNothing;
};

// How much each of two disjoint sets of keys counts in their union.
template <class T>
struct Shares {
  T mine, other, lse;
};

// A set without keys counts nothing, and the other then exactly 1.
template <class T>
Shares<T> shares(T mine, T other) {
  if (other == Partial<T>::kNothing) return {1, 0, mine};
  if (mine == Partial<T>::kNothing) return {0, 1, other};
  const T top = std::max(mine, other);
  const T of_mine = std::exp(mine - top), of_other = std::exp(other - top), both = of_mine + of_other;
  return {of_mine / both, of_other / both, top + std::log(both)};  // not exp(mine - lse), which has the rounding of lse
}

template <class T>
void merge(Partial<T>& mine, const Partial<T>& other) {
  const Shares<T> share = shares(mine.lse, other.lse);
  mine.lse = share.lse;
  if (share.other == 0) return;
  for (size_t c = 0; c < mine.out.size(); ++c) {
    mine.out[c] = (share.mine == 0 ? 0 : share.mine * mine.out[c]) + share.other * other.out[c];
  }
}

}  // namespace blockcp
