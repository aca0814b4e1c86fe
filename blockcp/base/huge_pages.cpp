#include "blockcp/base/huge_pages.h"

#include <sys/mman.h>

namespace blockcp {

void advise_huge_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kLeastOnHugePages) return;
  const auto address = reinterpret_cast<intptr_t>(data);
  const intptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage,
                 end = (address + bytes) / kHugePage * kHugePage;
  // Advice: that it was not taken changes nothing but the time.
  (void)madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace blockcp
