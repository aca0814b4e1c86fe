// blockcp: plans, explains and runs attention over packed documents on ranks that are threads of this process.
//
// Exit codes: see kExitCodes; all but 0 come with one line on stderr that says what, or with the table that shows it.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <new>

#include "blockcp/base/error.h"
#include "blockcp/base/text.h"
#include "cli/command.h"

namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 done, 1 a result is wrong, 2 bad usage or bad input, 3 the machine failed: too little memory, say.";
enum ExitCode { kWrongUsage = 2, kMachineFailed = 3 };

int fail(ExitCode code, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "blockcp: {}\n", message);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("Attention over packed documents in context parallelism", "blockcp");
  program.require_subcommand(1);
  program.footer(fmt::format("blockcp COMMAND --help lists the options of a command, with examples.\n{}", kExitCodes));
  const std::map<std::string, blockcp::Command> commands = {{"doctor", blockcp::add_doctor(program)},
                                                            {"explain", blockcp::add_explain(program)},
                                                            {"run", blockcp::add_run(program)}};
  const auto named = [&](CLI::App* command) { return command->check_name(argv[1]); };
  if (argc > 1 && argv[1][0] != '-' && program.get_subcommands(named).empty())
    return fail(kWrongUsage,
                fmt::format("[cli] a command must be explain, run or doctor, but is {}. Try blockcp --help.",
                            blockcp::shown(argv[1])));
  try {
    program.parse(argc, argv);
    return commands.at(program.get_subcommands().front()->get_name())();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);
    return fail(kWrongUsage, fmt::format("{}. Try blockcp --help.", error.what()));
  } catch (const blockcp::Error& error) {
    return fail(error.kind() == blockcp::ErrorKind::argument ? kWrongUsage : kMachineFailed, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kMachineFailed,
                "[cli] the call needs more memory than there is. Take fewer rows (--max-rows) or heads.");
  } catch (const std::exception& error) {
    return fail(kMachineFailed, error.what());
  }
}
