#include "blockcp/base/text.h"

#include <gtest/gtest.h>

namespace blockcp {
namespace {

TEST(Text, OneIsSingular) {
  EXPECT_EQ(counted(0, "row"), "0 rows");
  EXPECT_EQ(counted(1, "row"), "1 row");
  EXPECT_EQ(counted(2, "KV head"), "2 KV heads");
}

TEST(Text, WhatAUserWroteIsShownWhole) {
  EXPECT_EQ(shown("6,2"), "\"6,2\"");
  EXPECT_EQ(shown(std::string_view("a\0b\n\x7f\xef", 6)), "\"a\\x00b\\x0a\\x7f\\xef\"");
  EXPECT_EQ(shown(std::string(100, 'x')), '"' + std::string(80, 'x') + "...\"");
}

}  // namespace
}  // namespace blockcp
