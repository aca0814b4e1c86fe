#include <fmt/format.h>

#include "cli/command.h"
#include "cli/input.h"

namespace blockcp {

Command add_explain(CLI::App& program) {
  auto input = std::make_shared<Input>();
  CLI::App* command =
      program.add_subcommand("explain", "Which path would deliver K and V for this batch, and what each costs");
  command->footer(R"(Examples:
  blockcp explain --lengths 6,2,5,3 --world 4
  blockcp explain --lengths lengths.txt --world 8 --window 1024
  blockcp explain --lengths bytes.txt --lengths-divide 4 --rows 262144 --world 16 --json)");
  add_options(*command, *input);
  return [input] {
    const Plan plan(packing_of(*input), options_of(*input));
    const Shape shape = cost_shape(shape_of(*input));
    if (input->json)
      fmt::print("{}\n", explain_json(plan, shape));
    else
      fmt::print("{}{}", padding_text(plan), explain(plan, shape));
    return 0;
  };
}

}  // namespace blockcp
