#include "cli/input.h"

#include <charconv>
#include <filesystem>
#include <fstream>

#include "blockcp/base/error.h"
#include "blockcp/base/text.h"

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
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";  // some editors begin UTF-8 with it
  std::ifstream file(path);
  std::vector<int64_t> values;
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    if (++number == 1 && line.starts_with(kByteOrderMark)) line.erase(0, kByteOrderMark.size());
    const std::string text = trimmed(line);
    if (text.empty()) continue;
    const auto value = integer(text);
    check_argument(value.has_value(), "[cli] a line must hold one whole number, but line {} of {} is {}.", number,
                   shown(path), shown(text));
    values.push_back(*value);
  }
  check_argument(file.eof(), "[cli] the file {} must be readable, but it is not. Check its kind and permissions.",
                 shown(path));
  return values;
}

std::vector<int64_t> integers_in_list(const std::string& list) {
  std::vector<int64_t> values;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const auto value = integer(trimmed(std::string_view(list).substr(begin, end - begin)));
    check_argument(value.has_value(),
                   "[cli] --lengths must name a file or list whole numbers as in 6,2,5,3, but there is no file {} "
                   "and it is no such list. Check the path.",
                   shown(list));
    values.push_back(*value);
    begin = end + 1;
  }
  return values;
}

// Documents in order, as long as they fit.
void keep_what_fits(std::vector<int64_t>& lengths, int64_t rows) {
  int64_t left = rows;
  const auto end = std::find_if(lengths.begin(), lengths.end(), [&](int64_t n) {
    if (n > left) return true;
    left -= std::max<int64_t>(n, 0);  // negative ones are refused later, in the order of the file
    return false;
  });
  check_argument(end != lengths.begin(),
                 "[cli] --max-rows must leave room for a document, but is {}, less than the first ({}).", rows,
                 lengths.front());
  lengths.erase(end, lengths.end());
}

// "8/2" or "8", which stands for "8/8".
std::pair<int64_t, int64_t> one_or_two(const std::string& text, const char* option) {
  constexpr int64_t kMost = 1 << 20;  // far more than any model has
  const size_t slash = text.find('/');
  const auto first = integer(text.substr(0, slash));
  const auto second = slash == std::string::npos ? first : integer(text.substr(slash + 1));
  check_argument(first && second && std::min(*first, *second) >= 1 && std::max(*first, *second) <= kMost,
                 "[cli] {} must be a number from 1 to {} or two as in 8/2, but is {}.", option, kMost, shown(text));
  return {*first, *second};
}

SpanWindow parse_span_window(const std::string& text) {
  if (text == "left") return SpanWindow::left;
  if (text == "both") return SpanWindow::both;
  if (text == "none") return SpanWindow::none;
  fail_argument("[cli] --span-window must be left, both or none, but is {}.", shown(text));
}

Mask mask_of(const Input& input) {
  const bool causal = !input.both_ways;
  Mask mask;
  if (input.left || input.right)
    mask = windowed(input.left, input.right ? input.right : causal ? std::optional<int64_t>(0) : std::nullopt, causal);
  else
    mask = windowed(input.window, causal);
  if (!input.spans.empty()) {
    check_argument(std::filesystem::exists(input.spans), "[cli] --spans must name a file, but there is no file {}.",
                   shown(input.spans));
    mask.spans = integers_in_file(input.spans);
    check_argument(!mask.spans.empty(), "[cli] --spans must have one span id a row, but {} has none.",
                   shown(input.spans));
  }
  mask.span_window = parse_span_window(input.span_window);
  return mask;
}

}  // namespace

int64_t parse_integer(const std::string& text, std::string_view option, Limits limits) {
  const auto value = integer(trimmed(text));
  check_argument(value && *value >= limits.least && *value <= limits.most,
                 "[cli] {} must be a whole number from {} to {}, but is {}.", option, limits.least, limits.most,
                 shown(text));
  return *value;
}

void add_options(CLI::App& command, Input& input) {
  const char *batch = "Batch", *masks = "Mask";
  command.add_option("--lengths", input.lengths, "Document lengths: a file with one a line, or a list as in 6,2,5,3")
      ->required()
      ->group(batch);
  add_integer(command, "--lengths-divide", input.divide, "Divide lengths by this, rounding up (bytes to tokens)", {1})
      ->group(batch);
  add_integer(command, "--max-rows", input.max_rows, "Take only the first documents, those that fit into so many rows",
              {0})
      ->group(batch);
  add_integer(command, "--rows", input.rows, "Rows in all; what the documents leave is padding", {0})->group(batch);
  // Every rank's schedule is built, and each may name every other rank.
  add_integer(command, "--world,--ranks", input.world, "Ranks of the context-parallel group", {1, 8192})
      ->default_str(std::to_string(input.world))
      ->group(batch);
  auto* window =
      add_integer(command, "--window", input.window, "Keys a row sees, itself included; -1 is unbounded", {-1})
          ->group(masks);
  add_integer(command, "--left", input.left, "Keys before the row; -1 is unbounded", {-1})
      ->excludes(window)
      ->group(masks);
  add_integer(command, "--right", input.right, "Keys after the row; 0 under causal", {-1})
      ->excludes(window)
      ->group(masks);
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
  const bool file = std::filesystem::exists(input.lengths);
  std::vector<int64_t> lengths = file ? integers_in_file(input.lengths) : integers_in_list(input.lengths);
  for (int64_t& length : lengths)
    if (length > 0) length = (length - 1) / input.divide + 1;
  check_argument(!lengths.empty(), "[cli] there must be at least one document length, but {} has none.",
                 shown(input.lengths));
  if (input.max_rows >= 0) keep_what_fits(lengths, input.max_rows);
  return Packing::from_lengths({lengths}, input.rows);
}

PlanOptions options_of(const Input& input) {
  PlanOptions options;
  options.world = input.world;
  options.masks = {{"full", mask_of(input)}};
  if (input.exchange != "auto") options.exchange = {{"full", parse_path(input.exchange)}};
  options.pad = true;
  return options;
}

AttentionShape shape_of(const Input& input) {
  AttentionShape shape;
  shape.dtype = parse_dtype(input.dtype);
  std::tie(shape.q_heads, shape.kv_heads) = one_or_two(input.heads, "--heads");
  std::tie(shape.head_dim, shape.value_dim) = one_or_two(input.dim, "--dim");
  check_argument(shape.q_heads % shape.kv_heads == 0,
                 "[cli] the KV heads must divide the query heads, but --heads is {}.", shown(input.heads));
  return shape;
}

Shape cost_shape(const AttentionShape& shape) {
  return {shape.q_heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype};
}

std::string padding_text(const Plan& plan) {
  const int64_t added = plan.packing().rows() - plan.given_rows();
  if (added == 0) return "";
  return fmt::format("{} of padding added to {}, so that {} ranks divide them\n", counted(added, "row"),
                     plan.given_rows(), plan.world());
}

}  // namespace blockcp
