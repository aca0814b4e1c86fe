// What the subcommands share: the options that describe a packed batch, its mask and the shape of its tensors.
#pragma once

#include <CLI/CLI.hpp>

#include <limits>
#include <optional>
#include <string>

#include "blockcp/kernels/attention.h"
#include "blockcp/plan/plan.h"

namespace blockcp {

struct Input {
  std::string lengths;
  int64_t divide = 1, rows = -1, max_rows = -1;
  int world = 4;
  std::optional<int64_t> window, left, right;
  bool both_ways = false;
  std::string spans, span_window = "left", exchange = "auto";
  std::string heads = "8/2", dim = "128", dtype = "fp32";
  bool json = false;
};

// What an integer option takes.
struct Limits {
  int64_t least, most = std::numeric_limits<int64_t>::max();
};

// The number that `text` writes. Throws Error(argument), naming the option, for anything else and for one that is out
// of the limits.
int64_t parse_integer(const std::string& text, std::string_view option, Limits limits);

// An option with a whole number; `names` as CLI11 has them.
template <class Number>
CLI::Option* add_integer(CLI::App& command, const std::string& names, Number& value, const std::string& description,
                         Limits limits) {
  const std::string option = names.substr(0, names.find(','));
  const auto set = [&value, option, limits](const std::string& text) {
    value = static_cast<Number>(parse_integer(text, option, limits));
  };
  return command.add_option_function<std::string>(names, set, description)->type_name("INT");
}

void add_options(CLI::App& command, Input& input);
void add_shape_options(CLI::App& command, Input& input);  // --heads, --dim, --dtype and --json alone

// All three throw Error(argument) with one clear line.
Packing packing_of(const Input& input);
PlanOptions options_of(const Input& input);  // pads
AttentionShape shape_of(const Input& input);
Shape cost_shape(const AttentionShape& shape);

// "3 rows of padding added to 1597, so that 4 ranks divide them" and a line's end; empty where none were.
std::string padding_text(const Plan& plan);

}  // namespace blockcp
