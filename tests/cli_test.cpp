// The program as people run it: its exit codes, its lines and its JSON. BLOCKCP_PROGRAM is its path.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "blockcp/base/parallel.h"
#include "blockcp/kernels/reference.h"
#include "blockcp/kernels/select.h"
#include "blockcp/transport/threads/threads.h"
#include "cli/check.h"

namespace blockcp {
namespace {

using testing::HasSubstr;
using testing::Not;
using Json = nlohmann::json;

struct Result {
  int code;
  std::string out, err;
  Json json() const { return Json::parse(out); }
};

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("blockcp_cli_{}", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }
  std::string contents(const char* name) const {
    std::ifstream in(folder_ / name);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  Result run(const std::string& arguments) const {
    const std::string command =
        fmt::format("{} {} > {}/out 2> {}/err", BLOCKCP_PROGRAM, arguments, folder_.string(), folder_.string());
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents("out"), contents("err")};
  }

  std::filesystem::path folder_;
};

TEST_F(Cli, explain_names_every_path_and_the_chosen_one_with_its_reason) {
  const Result result = run("explain --lengths 6,2,5,3 --world 4");
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* text : {"allgather", "* halo", "a2a", "ring", "fewest rows", "4 documents"})
    EXPECT_THAT(result.out, HasSubstr(text));
  EXPECT_THAT(result.out, Not(HasSubstr("padding added")));
}

TEST_F(Cli, explain_as_json_counts_rows_and_bytes_of_every_path) {
  const Json json = run("explain --lengths 10,6 --world 4 --heads 4/2 --dim 8/4 --dtype bf16 --json").json();
  const Json& mask = json["masks"]["full"];
  EXPECT_EQ(mask["path"], "a2a");
  EXPECT_EQ(json["shape"]["value_dim"], 4);
  for (const Json& path : mask["paths"]) {
    EXPECT_EQ(path["admitted"], path["path"] != "halo");
    EXPECT_EQ(path.contains("why_not"), path["path"] == "halo");
    if (path["path"] != "a2a") continue;
    EXPECT_EQ(path["rows_received"], Json({0, 4, 8, 2}));
    EXPECT_EQ(path["forward_bytes_received"][2], 8 * 2 * (8 + 4) * 2);
  }
}

TEST_F(Cli, lengths_come_from_a_file_or_the_command_line) {
  const std::string lengths = file("lengths.txt", "6\n2\n\n 5 \r\n3");
  EXPECT_EQ(run("explain --json --lengths " + lengths).out, run("explain --json --lengths 6,2,5,3").out);
  EXPECT_EQ(run("explain --json --lengths-divide 4 --lengths 21,8,17,12").out,
            run("explain --json --lengths 6,2,5,3").out);
  EXPECT_EQ(run("explain --json --max-rows 15 --lengths 6,2,5,3").out, run("explain --json --lengths 6,2,5").out);
  EXPECT_EQ(run("explain --json --rows 32 --lengths 6,2,5,3").json()["rows"], 32);
}

TEST_F(Cli, pads_by_itself_and_says_so) {
  const Result result = run("explain --lengths 6,2,5 --ranks 4");
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("3 rows of padding added to 13, so that 4 ranks divide them"));
}

TEST_F(Cli, masks_are_told_in_every_spelling) {
  const auto pairs = [&](const std::string& mask) {
    return run("explain --json --lengths 4 --world 1 " + mask).json()["masks"]["full"]["visible_pairs"].get<int>();
  };
  EXPECT_EQ(pairs(""), 10);
  EXPECT_EQ(pairs("--no-causal"), 16);
  EXPECT_EQ(pairs("--window 2"), 7);
  EXPECT_EQ(pairs("--window -1"), 10);
  EXPECT_EQ(pairs("--left 1"), 7);
  EXPECT_EQ(pairs("--left 1 --right 0"), 7);
  EXPECT_EQ(pairs("--no-causal --left 1 --right 1"), 10);
  const std::string spans = file("spans.txt", "0\n1\n1\n1\n");
  EXPECT_EQ(pairs("--spans " + spans), 13);
  EXPECT_EQ(pairs("--window 2 --spans " + spans), 10);
  EXPECT_EQ(pairs("--window 2 --span-window none --spans " + spans), 11);
}

TEST_F(Cli, run_checks_itself_on_every_path_type_and_kernel) {
  for (const char* options : {"--exchange allgather", "--exchange a2a --dtype fp64", "--exchange ring --dtype bf16",
                              "--exchange halo --window 9 --dtype fp16", "--kernel reference --no-causal"}) {
    const Result result =
        run(fmt::format("run --json --lengths 70,1,33,50,2 --ranks 4 --heads 4/2 --dim 16/24 {}", options));
    ASSERT_EQ(result.code, 0) << options << result.err << result.out;
    const Json json = result.json();
    EXPECT_TRUE(json["ok"].get<bool>());
    EXPECT_EQ(json["check"]["documents"], 5);
    for (const char* tensor : {"out", "lse", "dq", "dk", "dv"})
      EXPECT_LE(json["check"]["errors"][tensor]["error"], json["check"]["errors"][tensor]["limit"]);
    int64_t moved = 0;
    for (const Json& rank : json["ranks"]) {
      EXPECT_EQ(rank["forward_bytes_counted"], rank["forward_bytes_moved"]);
      EXPECT_EQ(rank["backward_bytes_counted"], rank["backward_bytes_moved"]);
      moved += rank["forward_bytes_moved"].get<int64_t>();
    }
    EXPECT_GT(moved, 0) << options;
  }
}

TEST_F(Cli, run_prints_a_table_for_people) {
  const Result result = run("run --lengths 70,1,33,50,2 --ranks 3 --rows 180 --heads 2 --dim 8");
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* text :
       {"path ", "rows received", "GFLOP/s", "relative error", "padding is exactly zero", "all right"})
    EXPECT_THAT(result.out, HasSubstr(text));
}

TEST_F(Cli, run_says_what_it_checked_of_long_documents) {
  const Json json = run("run --json --lengths 400,20 --ranks 2 --heads 1 --dim 8 --check 20000").json();
  EXPECT_EQ(json["check"]["documents"], 1);
  EXPECT_GE(json["check"]["single_rows"], 2);
  EXPECT_THAT(run("run --lengths 40 --ranks 2 --check 0").out, HasSubstr("not checked"));
}

TEST_F(Cli, the_seed_decides_the_data) {
  const auto errors = [&](int seed) {
    return run(fmt::format("run --json --lengths 40,30 --heads 2 --dim 8 --seed {}", seed)).json()["check"]["errors"];
  };
  EXPECT_EQ(errors(3), errors(3));
  EXPECT_NE(errors(3), errors(4));
}

TEST_F(Cli, doctor_tells_the_machine_its_kernels_and_peaks) {
  const Machine machine = detect_machine();
  const Result result = run("doctor");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (const std::string& text : {machine.cpu, std::string("AVX-512"), std::string("GFLOP/s"), std::string("fp64")})
    EXPECT_THAT(result.out, HasSubstr(text));
  for (const Kernel& kernel : all_kernels()) {
    EXPECT_THAT(result.out, HasSubstr(kernel.name));
    EXPECT_THAT(result.out, HasSubstr(kernel.why_not({}, machine)));
  }
}

TEST_F(Cli, doctor_as_json_chooses_as_the_library_does) {
  const Machine machine = detect_machine();
  for (const DType type : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    const AttentionShape shape{type, 6, 3, 40, 24};
    const Json json = run(fmt::format("doctor --json --heads 6/3 --dim 40/24 --dtype {}", name(type))).json();
    EXPECT_EQ(json["chosen"], select_kernel(shape, machine).name);
    EXPECT_EQ(json["processors"], machine.processors);
    EXPECT_EQ(json["instruction_sets"]["avx512_bf16"], machine.avx512_bf16);
    ASSERT_EQ(json["kernels"].size(), all_kernels().size());
    for (size_t i = 0; i < all_kernels().size(); ++i) {
      EXPECT_EQ(json["kernels"][i]["name"], all_kernels()[i].name);
      EXPECT_EQ(json["kernels"][i]["why_not"], all_kernels()[i].why_not(shape, machine));
    }
    EXPECT_EQ(json["instruction_sets"]["neon"], machine.neon);
    EXPECT_EQ(json["peaks"].size(), machine.avx512_bf16 ? 3u : machine.avx2 || machine.neon ? 2u : 1u);
    for (const Json& peak : json["peaks"]) {
      EXPECT_GT(peak["one_thread"].get<double>(), 0.1);
      EXPECT_GT(peak["all_threads"].get<double>(), 0.1);
    }
  }
}

TEST_F(Cli, help_has_examples) {
  EXPECT_THAT(run("--help").out, HasSubstr("explain"));
  for (const auto& [command, option] :
       {std::pair("explain", "--lengths"), {"run", "--lengths"}, {"doctor", "--dtype"}}) {
    const Result help = run(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.out, HasSubstr("Examples:"));
    EXPECT_THAT(help.out, HasSubstr(option));
  }
}

TEST_F(Cli, misuse_is_one_clear_line_and_exit_code_2) {
  const std::string bad = file("bad.txt", "6\ntwo\n"), empty = file("empty.txt", ""),
                    spans = file("spans.txt", "1\n0\n1\n0\n"), nul = file("nul.txt", std::string("6\n7\0x\n", 7)),
                    wide = file("wide.txt", "6\n99999999999999999999\n");
  const std::string too_large = "99999999999999999999";
  const std::pair<std::string, std::string> cases[] = {
      {"", "subcommand"},
      {"fly", "fly"},
      {"explain", "--lengths"},
      {"explain --lengths 6 --wrold 4", "--wrold"},
      {"explain --lengths nowhere.txt", "no file \"nowhere.txt\""},
      {"explain --lengths " + bad, "line 2 of"},
      {"explain --lengths " + empty, "at least one document"},
      {"explain --lengths 6,-2,5", "lengths[1] of sequence 0 is -2"},
      {"explain --lengths 6,,5", "no such list"},
      {"explain --lengths 6,2 --rows 7", "7"},
      {"explain --lengths 6,2 --max-rows 5", "less than the first (6)"},
      {"explain --lengths 6,2 --world 0", "--world must be a whole number from 1 to 8192, but is \"0\""},
      {"explain --lengths 6,2 --world many", "--world"},
      {"explain --lengths 6,2 --window 0", "window"},
      {"explain --lengths 6,2 --left 2 --right 1", "causal"},
      {"explain --lengths 6,2 --window 3 --left 2", "excludes"},
      {"explain --lengths 4 --spans " + spans, "span"},
      {"explain --lengths 5 --spans nowhere.txt", "no file \"nowhere.txt\""},
      {"explain --lengths 5 --span-window up", "--span-window"},
      {"explain --lengths 6,2 --exchange pigeon", "pigeon"},
      {"explain --lengths 10,6 --exchange halo", "halo"},
      {"explain --lengths 6,2 --heads 8/3", "divide"},
      {"explain --lengths 6,2 --heads eight", "--heads"},
      {"explain --lengths 6,2 --dim 0", "--dim"},
      {"explain --lengths 6,2 --dtype fp8", "fp8"},
      {"explain --lengths 6,2 --lengths-divide 0", "--lengths-divide"},
      {"explain --lengths 5 --spans " + empty, "--spans must have one span id a row, but"},
      {"explain --lengths 5 --spans " + folder_.string(), "must be readable"},
      {"explain --lengths " + nul, "is \"7\\x00x\"."},
      {"explain --lengths " + wide, "line 2 of"},
      {"explain --lengths 6," + too_large, too_large},
      {"explain --lengths 6,9223372036854775807 --max-rows 4", "less than the first (6)"},
      {"explain --lengths 6,2 --window " + too_large, "--window must be a whole number from -1 to"},
      {"explain --lengths 6,2 --window -2", "--window"},
      {"explain --lengths 6,2 --left " + too_large + " --right 0", "--left"},
      {"explain --lengths 6,2 --rows " + too_large, "--rows"},
      {"explain --lengths 6,2 --world 4294967297", "\"4294967297\""},
      {"explain --lengths 6,2 --rows 2147483647 --world 8", "padding makes 2147483648 of its 2147483647"},
      {"explain --lengths 6,2 --heads 4294967296", "--heads"},
      {"explain --lengths 6,2 --rows 2147483640 --heads 1048576 --dim 1048576", "64 bits"},
      {"run --lengths 6,2 --rows 2147483640 --heads 1048576 --dim 1048576 --ranks 1", "64 bits"},
      {"run --lengths 6,2 --seed -1", "--seed must be a whole number from 0 to 2305843009213693951, but is \"-1\""},
      {"run --lengths 6,2 --seed " + too_large, "--seed"},
      {"run --lengths 6,2 --seed 1.5", "\"1.5\""},
      {"run --lengths 6,2 --check " + too_large, "--check"},
      {"run --lengths 6,2 --threads 4294967297", "--threads"},
      {"run --lengths 6,2 --kernel abacus", "abacus"},
      {"run --lengths 6,2 --threads -1", "--threads"},
      {"run --lengths 6,2 --check -1", "--check"},
      {"doctor --lengths 6,2", "--lengths"},
      {"doctor --heads 8/3", "divide"},
      {"doctor --dtype fp8", "fp8"},
  };
  for (const auto& [arguments, text] : cases) {
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 2) << arguments << ": " << result.err << result.out;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << arguments << ": " << result.err;
    EXPECT_THAT(result.err, HasSubstr(text)) << arguments;
    EXPECT_EQ(result.out, "") << arguments;
  }
}

TEST_F(Cli, a_window_that_covers_everything_is_printed_as_it_was_given) {
  EXPECT_THAT(run("explain --lengths 6,2 --left 9223372036854775807 --right 0").out,
              HasSubstr("window 9223372036854775808"));
}

TEST_F(Cli, files_may_begin_with_a_byte_order_mark_and_be_pipes) {
  const std::string marked = file("marked.txt",
                                  "\xef\xbb\xbf"
                                  "6\n2\n");
  EXPECT_EQ(run("explain --json --lengths " + marked).out, run("explain --json --lengths 6,2").out);
  EXPECT_EQ(run("explain --json --lengths /dev/stdin < " + marked).out, run("explain --json --lengths 6,2").out);
}

TEST_F(Cli, one_is_singular) {
  EXPECT_THAT(run("explain --lengths 1 --world 1").out,
              HasSubstr("1 document in 1 x 1 row (1 real, 0 padding), 1 rank of 1 row,"));
  EXPECT_THAT(run("explain --lengths 3,2 --world 2 --heads 2/1").out,
              testing::AllOf(HasSubstr("1 row of padding added to 5"), HasSubstr("bytes for 1 KV head,")));
  EXPECT_THAT(run("explain --lengths 1,3 --world 2 --exchange halo --no-causal").err, HasSubstr("rank 0 needs 2 rows"));
  EXPECT_THAT(run("explain --lengths 1,2,1 --world 2 --exchange halo --no-causal").err, HasSubstr("needs 1 row of"));
  const std::string out = run("run --lengths 1 --ranks 1 --threads 1 --heads 1 --dim 4").out;
  for (const char* text :
       {"1 document in 1 row\n", "with 1 thread each", "1 visible pair\n", "1 of 1 document in full"})
    EXPECT_THAT(out, HasSubstr(text));
}

TEST_F(Cli, exit_codes_are_told_and_too_little_memory_has_its_own) {
  for (const char* command : {"--help", "run --help"}) {
    EXPECT_THAT(run(command).out, HasSubstr("2 "));
    EXPECT_THAT(run(command).out, HasSubstr("3 "));
    EXPECT_THAT(run(command).out, HasSubstr("memory"));
  }
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer ends a process that asks for this much";
#endif
  const Result result = run("run --lengths 2000000000 --heads 512 --dim 512 --ranks 1");
  EXPECT_EQ(result.code, 3) << result.err;
  EXPECT_THAT(result.err, HasSubstr("[cli] the call needs more memory than there is."));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

// A right result of one document on one rank, and then a wrong element.
TEST(Check, finds_a_wrong_element_of_every_tensor) {
  const AttentionShape shape{DType::f32, 2, 1, 8, 8};
  const Plan plan(Packing::from_lengths({{20, 9}}, 32), {.world = 1});
  WholeTensors tensors(shape, 32);
  const auto parallel = make_serial();
  uint64_t seed = 0;
  for (WholeTensor* tensor : {&tensors.q, &tensors.k, &tensors.v, &tensors.dout}) tensor->fill(++seed, *parallel);
  const Kernel kernel = reference_kernel();
  run_ranks(1, [&](Transport& transport) {
    const Call call{.schedule = plan.entry().schedule,
                    .shape = shape,
                    .batch = 1,
                    .local_rows = 32,
                    .scale = 0.5,
                    .kernel = kernel,
                    .transport = transport,
                    .parallel = *parallel};
    const auto all = [](const WholeTensor& tensor) { return tensor.from(0); };
    forward(call, {all(tensors.q), all(tensors.k), all(tensors.v), all(tensors.out), all(tensors.lse)});
    backward(call, {all(tensors.q), all(tensors.k), all(tensors.v), all(tensors.out), all(tensors.lse),
                    all(tensors.dout), all(tensors.dq), all(tensors.dk), all(tensors.dv)});
  });
  const auto report = [&] { return check_run(plan, shape, 0.5, tensors, 1'000'000, *parallel); };
  EXPECT_TRUE(report().ok());
  EXPECT_EQ(report().documents, 2);
  EXPECT_EQ(report().padding_rows, 3);
  for (WholeTensor* tensor : {&tensors.out, &tensors.lse, &tensors.dq, &tensors.dk, &tensors.dv})
    for (int64_t row : {7, 30}) {  // of a document, and of padding
      float& element = *static_cast<float*>(tensor->from(row).data);
      const float right = std::exchange(element, 1.5f);
      EXPECT_FALSE(report().ok());
      element = std::numeric_limits<float>::quiet_NaN();
      EXPECT_FALSE(report().ok());
      element = right;
    }
  EXPECT_TRUE(report().ok());

  // With less to spend, single rows and keys of what is too long.
  const auto short_of_money = [&] { return check_run(plan, shape, 0.5, tensors, 600, *parallel); };
  EXPECT_EQ(short_of_money().documents, 1);
  EXPECT_GE(short_of_money().single_rows, 1);
  EXPECT_TRUE(short_of_money().ok());
  for (WholeTensor* tensor : {&tensors.out, &tensors.lse, &tensors.dq, &tensors.dk, &tensors.dv}) {
    float& element = *static_cast<float*>(tensor->from(19).data);
    const float right = std::exchange(element, 1.5f);
    EXPECT_FALSE(short_of_money().ok());
    element = right;
  }
}

}  // namespace
}  // namespace blockcp
