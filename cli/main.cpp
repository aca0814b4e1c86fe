// blockcp: plans, explains and runs attention over packed documents on ranks that are threads of this process.
//
// Exit codes: 0 done, 1 a check or the system failed, 2 bad usage, with one line on stderr that says what.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <new>

#include "blockcp/base/error.h"
#include "cli/command.h"

namespace {

int fail(int code, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "blockcp: {}\n", message);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("Attention over packed documents in context parallelism", "blockcp");
  program.require_subcommand(1);
  program.footer("blockcp COMMAND --help lists the options of a command, with examples.");
  const std::map<std::string, blockcp::Command> commands = {{"doctor", blockcp::add_doctor(program)},
                                                            {"explain", blockcp::add_explain(program)},
                                                            {"run", blockcp::add_run(program)}};
  const auto named = [&](CLI::App* command) { return command->check_name(argv[1]); };
  if (argc > 1 && argv[1][0] != '-' && program.get_subcommands(named).empty())
    return fail(
        2, fmt::format("[cli] a command must be explain, run or doctor, but is \"{}\". Try blockcp --help.", argv[1]));
  try {
    program.parse(argc, argv);
    return commands.at(program.get_subcommands().front()->get_name())();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);
    return fail(2, fmt::format("{}. Try blockcp --help.", error.what()));
  } catch (const blockcp::Error& error) {
    return fail(error.kind() == blockcp::ErrorKind::argument ? 2 : 1, error.what());
  } catch (const std::bad_alloc&) {
    return fail(1, "[cli] the tensors need more memory than there is. Take fewer rows (--max-rows) or heads.");
  } catch (const std::exception& error) {
    return fail(1, error.what());
  }
}
