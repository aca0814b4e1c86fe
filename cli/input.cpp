#include "cli/input.h"

#include <charconv>
#include <filesystem>
#include <fstream>

#include "blockcp/base/error.h"

namespace blockcp {
namespace {

std::string trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(kSpace) - begin + 1));
}

std::optional<int64_t> integer(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<int64_t> integers_in_file(const std::string& path) {
  std::ifstream file(path);
  check_argument(file.good(), "[cli] the file {} must be readable, but it could not be opened. Check its permissions.",
                 path);
  std::vector<int64_t> values;
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const std::string text = trimmed(line);
    if (text.empty()) continue;
    const auto value = integer(text);
    check_argument(value.has_value(), "[cli] a line must hold one whole number, but line {} of {} is \"{}\".", number,
                   path, text);
    values.push_back(*value);
  }
  return values;
}

std::vector<int64_t> integers_in_list(const std::string& list) {
  std::vector<int64_t> values;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const auto value = integer(trimmed(std::string_view(list).substr(begin, end - begin)));
    check_argument(value.has_value(),
                   "[cli] --lengths must name a file or list whole numbers as in 6,2,5,3, but there is no file \"{}\" "
                   "and it is no such list. Check the path.",
                   list);
    values.push_back(*value);
    begin = end + 1;
  }
  return values;
}

// Documents in order, as long as they fit.
void keep_what_fits(std::vector<int64_t>& lengths, int64_t rows) {
  int64_t used = 0;
  const auto end = std::find_if(lengths.begin(), lengths.end(), [&](int64_t n) { return (used += n) > rows; });
  check_argument(end != lengths.begin(),
                 "[cli] --max-rows must leave room for a document, but {} rows are less than the first ({}).", rows,
                 lengths.empty() ? 0 : lengths.front());
  lengths.erase(end, lengths.end());
}

// "8/2" or "8", which stands for "8/8".
std::pair<int64_t, int64_t> one_or_two(const std::string& text, const char* option) {
  const size_t slash = text.find('/');
  const auto first = integer(text.substr(0, slash));
  const auto second = slash == std::string::npos ? first : integer(text.substr(slash + 1));
  check_argument(first && second && *first >= 1 && *second >= 1,
                 "[cli] {} must be a number from 1 on or two as in 8/2, but is \"{}\".", option, text);
  return {*first, *second};
}

SpanWindow parse_span_window(const std::string& text) {
  if (text == "left") return SpanWindow::left;
  if (text == "both") return SpanWindow::both;
  if (text == "none") return SpanWindow::none;
  fail_argument("[cli] --span-window must be left, both or none, but is \"{}\".", text);
}

Mask mask_of(const Input& input) {
  const bool causal = !input.both_ways;
  Mask mask;
  if (input.left || input.right)
    mask = windowed(input.left, input.right ? input.right : causal ? std::optional<int64_t>(0) : std::nullopt, causal);
  else
    mask = windowed(input.window, causal);
  if (!input.spans.empty()) {
    check_argument(std::filesystem::exists(input.spans), "[cli] --spans must name a file, but there is no file \"{}\".",
                   input.spans);
    mask.spans = integers_in_file(input.spans);
  }
  mask.span_window = parse_span_window(input.span_window);
  return mask;
}

}  // namespace

void add_options(CLI::App& command, Input& input) {
  const char *batch = "Batch", *masks = "Mask";
  command.add_option("--lengths", input.lengths, "Document lengths: a file with one a line, or a list as in 6,2,5,3")
      ->required()
      ->group(batch);
  command.add_option("--lengths-divide", input.divide, "Divide lengths by this, rounding up (bytes to tokens)")
      ->group(batch);
  command.add_option("--max-rows", input.max_rows, "Take only the first documents, those that fit into so many rows")
      ->check(CLI::NonNegativeNumber)
      ->group(batch);
  command.add_option("--rows", input.rows, "Rows in all; what the documents leave is padding")
      ->check(CLI::NonNegativeNumber)
      ->group(batch);
  command.add_option("--world,--ranks", input.world, "Ranks of the context-parallel group")
      ->capture_default_str()
      ->group(batch);
  auto* window =
      command.add_option("--window", input.window, "Keys a row sees, itself included; -1 is unbounded")->group(masks);
  command.add_option("--left", input.left, "Keys before the row; -1 is unbounded")->excludes(window)->group(masks);
  command.add_option("--right", input.right, "Keys after the row; 0 under causal")->excludes(window)->group(masks);
  command.add_flag("--no-causal", input.both_ways, "Rows also see what comes after them in their document")
      ->group(masks);
  command.add_option("--spans", input.spans, "File with one span id a row, 0 for none: rows of a span see each other")
      ->group(masks);
  command.add_option("--span-window", input.span_window, "How the window cuts a span: left, both or none")
      ->capture_default_str()
      ->group(masks);
  command.add_option("--exchange", input.exchange, "auto, allgather, halo, a2a or ring")
      ->capture_default_str()
      ->group(batch);
  add_shape_options(command, input);
}

void add_shape_options(CLI::App& command, Input& input) {
  const char* tensors = "Tensors";
  command.add_option("--heads", input.heads, "Query heads / KV heads")->capture_default_str()->group(tensors);
  command.add_option("--dim", input.dim, "Width of q and k, or width / width of v")
      ->capture_default_str()
      ->group(tensors);
  command.add_option("--dtype", input.dtype, "fp32, fp64, bf16 or fp16")->capture_default_str()->group(tensors);
  command.add_flag("--json", input.json, "Print JSON");
}

Packing packing_of(const Input& input) {
  check_argument(input.divide >= 1, "[cli] --lengths-divide must be at least 1, but is {}.", input.divide);
  const bool file = std::filesystem::is_regular_file(input.lengths);
  std::vector<int64_t> lengths = file ? integers_in_file(input.lengths) : integers_in_list(input.lengths);
  for (int64_t& length : lengths)
    if (length > 0) length = (length - 1) / input.divide + 1;
  if (input.max_rows >= 0) keep_what_fits(lengths, input.max_rows);
  check_argument(!lengths.empty(), "[cli] there must be at least one document length, but {} has none.", input.lengths);
  return Packing::from_lengths({lengths}, input.rows);
}

PlanOptions options_of(const Input& input) {
  PlanOptions options;
  options.world = input.world;
  options.masks = {{"full", mask_of(input)}};
  if (input.exchange != "auto") options.exchange = {{"full", parse_path(input.exchange)}};
  constexpr int kMostRanks = 8192;  // every rank's schedule is built, and each may name every other rank
  check_argument(input.world <= kMostRanks, "[cli] there must be at most {} ranks, but --world is {}.", kMostRanks,
                 input.world);
  options.pad = true;
  return options;
}

AttentionShape shape_of(const Input& input) {
  AttentionShape shape;
  shape.dtype = parse_dtype(input.dtype);
  std::tie(shape.q_heads, shape.kv_heads) = one_or_two(input.heads, "--heads");
  std::tie(shape.head_dim, shape.value_dim) = one_or_two(input.dim, "--dim");
  check_argument(shape.q_heads % shape.kv_heads == 0,
                 "[cli] the KV heads must divide the query heads, but --heads is {}.", input.heads);
  return shape;
}

Shape cost_shape(const AttentionShape& shape) {
  return {shape.q_heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype};
}

std::string padding_text(const Plan& plan) {
  const int64_t added = plan.packing().rows() - plan.given_rows();
  if (added == 0) return "";
  return fmt::format("{} rows of padding added to {}, so that {} ranks divide them\n", added, plan.given_rows(),
                     plan.world());
}

}  // namespace blockcp
