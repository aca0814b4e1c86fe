#include "blockcp/base/huge_pages.h"

#include <sys/mman.h>

namespace blockcp {

void advise_huge_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kPage = int64_t{2} << 20, kWorthwhile = 4 * kPage;
  if (bytes < kWorthwhile) return;
  const auto address = reinterpret_cast<intptr_t>(data);
  const intptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
  // Advice: that it was not taken changes nothing but the time.
  (void)madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace blockcp
