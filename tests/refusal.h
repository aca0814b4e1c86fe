// What the library says when it refuses a call.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "blockcp/base/error.h"

namespace blockcp {

inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::argument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

}  // namespace blockcp
