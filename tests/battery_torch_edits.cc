// Programs of the battery that look at weights and change them between steps: edits, copies,
// averages, files, pointers.

#include <ATen/Functions.h>
#include <signal.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>
#include <utility>

#include "tests/battery_torch.h"

namespace offload::battery {
namespace {

using torch::NoGradGuard;

struct Setting {
  explicit Setting(Run& run, bool sgd) : model(Perceptron(run)), engine(run.Open()) {
    optimizer = sgd ? engine->SGD(*model, optim::SGDOptions(0.05).momentum(0.9))
                    : engine->AdamW(*model, optim::AdamWOptions(1e-2));
  }
  nn::Sequential model;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<optim::Optimizer> optimizer;
};

nn::Sequential Squares(const Run& run) {
  torch::manual_seed(12);
  return run.Cast(nn::Sequential(nn::Linear(kWidth, kWidth), nn::Tanh(), nn::Linear(kWidth, kWidth),
                                 nn::Tanh(), nn::Linear(kWidth, kWidth)));
}

// Something is done to the model before the first step, and after each of three.
using Edit = std::function<void(Run&, Setting&, int step)>;
Program Edited(std::string name, Edit edit, bool sgd = true) {
  return {std::move(name), [=](Run& run) {
            Setting setting(run, sgd);
            edit(run, setting, -1);
            for (int step = 0; step < 3; ++step) {
              TrainStep(run, setting.model, *setting.optimizer, step);
              edit(run, setting, step);
            }
            TrainStep(run, setting.model, *setting.optimizer, 3);
            run.See(*setting.model);
          }};
}

Program Refused(int error, Program program) {
  program.refused = error;
  return program;
}

// What torch::save() has of the model.
void SeeSaved(Run& run, Setting& setting) {
  std::stringstream file;
  torch::save(setting.model, file);
  nn::Sequential copy = Perceptron(run);
  torch::load(copy, file);
  run.See(*copy);
}

// An edit of every parameter, under NoGradGuard.
using EditOne = std::function<void(Run&, Tensor& parameter, int step)>;
Program EachEdited(std::string name, EditOne edit, bool sgd = true) {
  return Edited(
      std::move(name),
      [=](Run& run, Setting& setting, int step) {
        const NoGradGuard no_grad;
        for (Tensor& parameter : setting.model->parameters()) edit(run, parameter, step);
      },
      sgd);
}

template <class Number>
void Halve(Tensor& parameter) {
  Number* const values = parameter.data_ptr<Number>();
  for (int64_t i = 0; i < parameter.numel(); i += 3) values[i] = values[i] * Number(0.5f);
}
void HalveThirds(Tensor& parameter) {
  if (parameter.scalar_type() == at::kFloat)
    Halve<float>(parameter);
  else
    Halve<at::BFloat16>(parameter);
}

Programs Edits() {
  return {
      EachEdited("clamped", [](Run&, Tensor& p, int) { p.clamp_(-0.04, 0.04); }),
      EachEdited(
          "clamped_data_adamw", [](Run&, Tensor& p, int) { p.data().clamp_(-0.04, 0.04); }, false),
      EachEdited("rows_normalised",
                 [](Run&, Tensor& p, int) {
                   if (p.dim() == 2) p.div_(p.norm(2, 1, true).clamp_min(1e-6));
                 }),
      EachEdited("norm_limited_by_renorm",
                 [](Run&, Tensor& p, int) {
                   if (p.dim() == 2) p.renorm_(2, 0, 0.5);
                 }),
      EachEdited("initialised_again",
                 [](Run&, Tensor& p, int step) {
                   torch::manual_seed(step + 50);
                   if (p.dim() < 2) {
                     nn::init::uniform_(p, -0.1, 0.1);
                   } else if (step == 0) {
                     nn::init::xavier_normal_(p);
                   } else if (step == 1) {
                     nn::init::kaiming_uniform_(p, 0.1);
                   } else {
                     nn::init::orthogonal_(p.data().to(at::kFloat));
                   }
                 }),
      EachEdited(
          "initialised_by_constants",
          [](Run&, Tensor& p, int step) {
            if (p.dim() < 2) nn::init::constant_(p, 0.01 * step);
            if (p.dim() == 2 && step == 0) nn::init::sparse_(p, 0.3);
            if (p.dim() == 2 && step == 1) nn::init::eye_(p);
          },
          false),
      EachEdited("parts_overwritten",
                 [](Run& run, Tensor& p, int step) {
                   p.slice(0, step + 2, step + 9).zero_();
                   p.select(0, 1).fill_(0.02);
                   p.view(-1).slice(0, 5, 15).copy_(run.Noise(step + 9, {10}) * 0.01);
                 }),
      EachEdited("elements_indexed",
                 [](Run&, Tensor& p, int) {
                   p.view(-1).index_fill_(0, torch::tensor({1, 4, 7}), 0.1);
                   p.index_put_({torch::tensor({0, 3})}, torch::full({}, 0.2, p.options()));
                   p.masked_fill_(p.abs() < 1e-3, 0);
                 }),
      EachEdited("pruned",
                 [](Run&, Tensor& p, int) {
                   const Tensor limit =
                       std::get<0>(p.to(at::kFloat).abs().flatten().kthvalue(p.numel() / 4));
                   p.mul_(p.to(at::kFloat).abs() > limit);
                 }),
      EachEdited(
          "rounded_to_eighths", [](Run&, Tensor& p, int) { p.mul_(64).round_().div_(64); }, false),
      EachEdited("noised", [](Run& run, Tensor& p,
                              int step) { p.add_(run.Noise(step + 70, p.sizes()), 1e-3); }),
      EachEdited("noised_from_the_generator",
                 [](Run&, Tensor& p, int) { p.add_(torch::randn_like(p), 1e-3); }),
      EachEdited("assigned_through_out",
                 [](Run& run, Tensor& p, int step) {
                   at::mul_out(p, p, torch::full({}, 0.9, p.options()));
                   at::add_out(p, p, run.Noise(step + 30, p.sizes()) * 1e-3);
                 }),
      EachEdited("swapped_with_itself_transposed",
                 [](Run&, Tensor& p, int) {
                   if (p.dim() == 2 && p.size(0) == p.size(1)) p.copy_(p.t().clone());
                 }),
      EachEdited("data_ptr_written", [](Run&, Tensor& p, int) { HalveThirds(p); }),
      EachEdited(
          "data_ptr_written_adamw", [](Run&, Tensor& p, int) { HalveThirds(p); }, false),
      EachEdited("raw_memory_copied_in_and_out",
                 [](Run& run, Tensor& p, int) {
                   std::vector<char> bytes(p.nbytes());
                   std::memcpy(bytes.data(), p.const_data_ptr(), bytes.size());
                   std::memset(bytes.data(), 0, 16);
                   std::memcpy(p.mutable_data_ptr(), bytes.data(), bytes.size());
                   run.See(torch::from_blob(bytes.data(), p.sizes(), p.options()).clone());
                 }),
      EachEdited(
          "written_through_a_pointer_with_what_it_has",
          [](Run&, Tensor& p, int step) {
            auto* const bytes = static_cast<volatile char*>(p.mutable_data_ptr());
            for (size_t i = 0; i < p.nbytes(); i += 100) bytes[i] = bytes[i];
            if (step == 2) p.mul_(1.0);
          },
          false),
      EachEdited(
          "from_raw_memory",
          [](Run&, Tensor& p, int step) {
            std::vector<float> values(p.numel());
            for (size_t i = 0; i < values.size(); ++i) values[i] = 0.001f * ((i + step) % 50);
            p.copy_(torch::from_blob(values.data(), p.sizes()));
          },
          false),
      // In none of these a master follows: the tensor's version does not change, or the bytes do
      // not.
      EachEdited("the_same_written_through_data", [](Run&, Tensor& p, int) { p.data().mul_(1.0); }),
      EachEdited(
          "changed_through_data_and_back",
          [](Run& run, Tensor& p, int step) {
            const Tensor before = p.data().clone();
            p.data().mul_(step + 3).add_(0.25);
            run.See(p.sum());
            p.data().copy_(before);
          },
          false),
      EachEdited("changed_through_a_pointer_and_back",
                 [](Run& run, Tensor& p, int) {
                   std::vector<char> bytes(p.nbytes());
                   std::memcpy(bytes.data(), p.const_data_ptr(), bytes.size());
                   std::memset(p.mutable_data_ptr(), 0, bytes.size());
                   run.See(p.sum());
                   std::memcpy(p.mutable_data_ptr(), bytes.data(), bytes.size());
                 }),
      Edited("other_weights_given_and_taken_back",
             [](Run& run, Setting& s, int step) {
               std::vector<Tensor> before;
               for (Tensor& p : s.model->parameters()) {
                 before.push_back(p.data().clone());
                 p.set_data(run.Noise(step + 20, p.sizes()) * 0.05);
               }
               run.See(battery::Loss(run, s.model, 70));
               const auto parameters = s.model->parameters();
               for (size_t i = 0; i < parameters.size(); ++i)
                 parameters[i].set_data(before[i].clone());
               for (const Tensor& p : parameters) run.See(s.engine->Gather(p, "master"));
             }),
      // In these it does, though the bytes are the same.
      EachEdited("the_same_written_with_its_version", [](Run&, Tensor& p, int) { p.mul_(1.0); }),
      EachEdited(
          "its_version_alone_changes",
          [](Run&, Tensor& p, int step) {
            if (step == 1) p.unsqueeze_(0).squeeze_(0);
            if (step == 2) p.unsafeGetTensorImpl()->bump_version();
          },
          false),
      EachEdited("changed_through_data_and_back_with_its_version",
                 [](Run&, Tensor& p, int) {
                   const Tensor before = p.clone();
                   p.data().zero_();
                   p.copy_(before);
                 }),
      Edited("the_same_written_by_a_list_operator",
             [](Run&, Setting& s, int) {
               const NoGradGuard no_grad;
               at::_foreach_mul_(s.model->parameters(), 1.0);
             }),
      EachEdited("accessor",
                 [](Run& run, Tensor& p, int) {
                   if (p.dim() != 2 || p.scalar_type() != at::kFloat) return;
                   auto values = p.accessor<float, 2>();
                   double trace = 0;
                   for (int64_t i = 0; i < std::min(p.size(0), p.size(1)); ++i) {
                     trace += values[i][i];
                     values[i][i] *= 0.9f;
                   }
                   run.See(trace);
                 }),
      EachEdited("alias_kept_from_before",
                 [](Run& run, Tensor& p, int) {
                   const Tensor alias = p.detach();
                   alias.view(-1)[0] = 0.25;
                   run.See(alias.sum());
                 }),
      EachEdited("items_read_one_by_one",
                 [](Run& run, Tensor& p, int) {
                   run.See(p.view(-1)[3].item<float>() + p.flatten()[7].item<double>() +
                           p.sum().item<float>() + p.max().item<float>());
                 }),
      EachEdited("copied_to_other_types",
                 [](Run& run, Tensor& p, int) {
                   run.See(p.to(at::kDouble));
                   run.See(p.to(at::kHalf));
                   run.See(p.to(at::kFloat));
                   run.See(p.cpu().contiguous());
                   run.See(p.toType(at::kLong));
                 }),
      EachEdited("cloned_lazily",
                 [](Run& run, Tensor& p, int) {
                   const NoGradGuard no_grad;
                   const Tensor clone = at::_lazy_clone(p);
                   p.mul_(0.5);
                   run.See(clone);
                   clone.zero_();
                   run.See(p);
                 }),
      EachEdited(
          "weight_decay_by_hand", [](Run&, Tensor& p, int) { p.mul_(1 - 0.01); }, false),
      Edited("matrix_made_orthogonal",
             [](Run&, Setting& s, int) {
               const NoGradGuard no_grad;
               Tensor& w = LinearAt(s.model, 4).weight;
               w.copy_(std::get<0>(at::linalg_qr(w.to(at::kFloat))));
             }),
      Edited("printed",
             [](Run& run, Setting& s, int) {
               std::ostringstream text;
               for (const auto& item : s.model->named_parameters())
                 text << item.key() << item.value().sizes() << item.value().slice(0, 0, 2);
               text << LinearAt(s.model, 0).bias;
               s.model->pretty_print(text);
               run.See(static_cast<double>(std::hash<std::string>()(text.str()) % 1000000));
             }),
      Edited("statistics_of_every_parameter",
             [](Run& run, Setting& s, int) {
               for (const auto& item : s.model->named_parameters()) {
                 const Tensor p = item.value().detach().to(at::kFloat);
                 run.See(p.mean().item<double>());
                 run.See(p.std().item<double>());
                 run.See(p.histc(10));
                 run.See(static_cast<double>(p.count_nonzero().item<int64_t>()));
               }
             }),
      Edited("own_layer_replaced_by_copy",
             [](Run& run, Setting& s, int step) {
               const NoGradGuard no_grad;
               torch::manual_seed(step + 500);
               nn::Linear fresh = run.Cast(nn::Linear(kInner, kWidth));
               LinearAt(s.model, 2).weight.copy_(fresh->weight);
               LinearAt(s.model, 2).bias.copy_(fresh->bias);
             }),
      Edited(
          "reset_parameters",
          [](Run&, Setting& s, int step) {
            torch::manual_seed(step + 600);
            LinearAt(s.model, 0).reset_parameters();
          },
          false),
      Edited("ema_copy",
             [average = std::make_shared<std::vector<Tensor>>()](Run& run, Setting& s, int step) {
               const NoGradGuard no_grad;
               const auto parameters = s.model->parameters();
               if (step < 0) {
                 average->clear();
                 for (const Tensor& p : parameters) average->push_back(p.clone());
               }
               for (size_t i = 0; i < parameters.size(); ++i)
                 (*average)[i].mul_(0.9).add_(parameters[i], 0.1);
               if (step == 2) {
                 for (const Tensor& p : *average) run.See(p);
               }
             }),
      Edited(
          "ema_by_lerp_on_detached",
          [average = std::make_shared<std::vector<Tensor>>()](Run& run, Setting& s, int step) {
            const auto parameters = s.model->parameters();
            if (step < 0) {
              average->clear();
              for (const Tensor& p : parameters) average->push_back(p.detach().clone());
            }
            for (size_t i = 0; i < parameters.size(); ++i)
              (*average)[i].lerp_(parameters[i].detach(), 0.2);
            if (step == 2) {
              for (const Tensor& p : *average) run.See(p);
            }
          },
          false),
      Edited("target_network",
             [target = std::make_shared<nn::Sequential>(nullptr)](Run& run, Setting& s, int step) {
               const NoGradGuard no_grad;
               if (step < 0) *target = Perceptron(run);
               auto from = s.model->named_parameters();
               for (auto& item : (*target)->named_parameters())
                 item.value().copy_(0.1 * from[item.key()] + 0.9 * item.value());
               run.See(battery::Loss(run, *target, 40 + step));
             }),
      Edited("target_network_by_data",
             [target = std::make_shared<nn::Sequential>(nullptr)](Run& run, Setting& s, int step) {
               if (step < 0) *target = Perceptron(run);
               const auto from = s.model->parameters(), to = (*target)->parameters();
               for (size_t i = 0; i < to.size(); ++i) to[i].data().copy_(from[i].data());
               run.See(battery::Loss(run, *target, 40 + step));
             }),
      Edited("cloned_module",
             [](Run& run, Setting& s, int) {
               const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(s.model->clone());
               run.See(*copy);
               run.See(copy->forward(run.Noise(9, {2, kWidth})));
             }),
      Edited("cloned_module_is_trained",
             [](Run& run, Setting& s, int step) {
               if (step != 1) return;
               nn::Sequential copy(std::dynamic_pointer_cast<nn::SequentialImpl>(s.model->clone()));
               optim::SGD optimizer(copy->parameters(), optim::SGDOptions(0.1));
               battery::Train(run, copy, optimizer, 20, 23);
               run.See(*copy);
             }),
      Edited(
          "rolled_back",
          [kept = std::make_shared<std::vector<Tensor>>()](Run&, Setting& s, int step) {
            const NoGradGuard no_grad;
            if (step == 0) {
              kept->clear();
              for (const Tensor& p : s.model->parameters()) kept->push_back(p.clone());
            }
            if (step == 2) {
              const auto parameters = s.model->parameters();
              for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_((*kept)[i]);
            }
          },
          false),
      Edited("weights_perturbed_and_put_back",
             [](Run& run, Setting& s, int step) {
               const NoGradGuard no_grad;
               std::vector<Tensor> before;
               for (Tensor& p : s.model->parameters()) {
                 before.push_back(p.clone());
                 p.add_(run.Noise(step + 80, p.sizes()), 0.01);
               }
               run.See(battery::Loss(run, s.model, 60));
               const auto parameters = s.model->parameters();
               for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(before[i]);
             }),
      Edited("sharpness_aware",
             [](Run& run, Setting& s, int step) {
               battery::Loss(run, s.model, 90 + step).backward();
               const NoGradGuard no_grad;
               std::vector<Tensor> moves;
               for (Tensor& p : s.model->parameters()) {
                 moves.push_back(p.grad() * 0.05);
                 p.add_(moves.back());
               }
               s.optimizer->zero_grad();
               {
                 const at::AutoGradMode grad(true);
                 battery::Loss(run, s.model, 90 + step).backward();
               }
               const auto parameters = s.model->parameters();
               for (size_t i = 0; i < parameters.size(); ++i) parameters[i].sub_(moves[i]);
               s.optimizer->step();
               s.optimizer->zero_grad();
             }),
      Edited("frozen_for_a_while",
             [](Run&, Setting& s, int step) {
               for (Tensor& p : LinearAt(s.model, 2).parameters())
                 p.set_requires_grad(step % 2 != 0);
             }),
      Edited("casts_to_its_own_type",
             [](Run& run, Setting& s, int) {
               s.model->to(run.dtype());
               s.model->to(at::kCPU);
               s.model->to(at::kCPU, run.dtype());
               s.model->train();
             }),
      Refused(1601, Edited("cast_to_double",
                           [](Run&, Setting& s, int step) {
                             if (step == 1) s.model->to(at::kDouble);
                           })),
      Refused(1601, Edited("cast_away_and_back",
                           [](Run& run, Setting& s, int step) {
                             if (step != 1) return;
                             s.model->to(at::kDouble);
                             s.model->to(run.dtype());
                           })),
      Edited("parameters_as_a_vector",
             [](Run& run, Setting& s, int step) {
               const Tensor all = nn::utils::parameters_to_vector(s.model->parameters());
               run.See(all);
               if (step == 1)
                 nn::utils::vector_to_parameters(all.detach() * 0.5, s.model->parameters());
             }),
      Edited("vector_that_stays",
             [vector = std::make_shared<Tensor>()](Run& run, Setting& s, int step) {
               if (step == 0)
                 *vector = nn::utils::parameters_to_vector(s.model->parameters()).detach();
               if (step == 1) {
                 vector->mul_(0.5);
                 nn::utils::vector_to_parameters(*vector, s.model->parameters());
               }
             }),
      // Each of them may be written, and the others see it.
      Edited("vector_that_is_the_parameters",
             [vector = std::make_shared<Tensor>()](Run& run, Setting& s, int step) {
               if (step < 0) {
                 *vector = nn::utils::parameters_to_vector(s.model->parameters()).detach();
                 nn::utils::vector_to_parameters(*vector, s.model->parameters());
               }
               run.See(*vector);  // what the step has made of it
               vector->mul_(0.9);
               run.See(*s.model);
               Tensor& weight = LinearAt(s.model, 0).weight;
               {
                 const NoGradGuard no_grad;
                 weight.mul_(1.1).add_(run.Noise(step + 9, weight.sizes()) * 0.01);
                 run.See(*vector);
                 run.See(Loss(run, s.model, step + 60));
               }
               vector->data()[step + 1] = 0.25;
               run.See(s.engine->Gather(weight));
               run.See(s.engine->Gather(weight, "master"));
               static_cast<std::byte*>(vector->data_ptr())[3] = std::byte{0x3c};
               SeeSaved(run, s);
             }),
      Edited("vector_that_is_written_and_gone",
             [](Run& run, Setting& s, int step) {
               {
                 Tensor vector = nn::utils::parameters_to_vector(s.model->parameters()).detach();
                 nn::utils::vector_to_parameters(vector, s.model->parameters());
                 vector.add_(run.Noise(step + 9, vector.sizes()) * 0.01);
               }
               run.See(*s.model);
             }),
      Edited("vector_that_is_given_again",
             [vector = std::make_shared<Tensor>()](Run& run, Setting& s, int step) {
               if (step < 0)
                 *vector = nn::utils::parameters_to_vector(s.model->parameters()).detach();
               run.See(*vector);
               nn::utils::vector_to_parameters(*vector, s.model->parameters());
               // Its pieces keep what is in them when the parameters leave.
               const Tensor other = *vector * 0.9;
               if (step == 1) nn::utils::vector_to_parameters(other, s.model->parameters());
               run.See(*vector);
               if (step == 1) vector->zero_();
               run.See(*s.model);
               if (step == 1) *vector = other;
             }),
      Edited("view_of_the_parameter_over_a_vector",
             [kept = std::make_shared<std::vector<Tensor>>()](Run& run, Setting& s, int step) {
               if (step < 0) kept->clear();
               for (const Tensor& each : *kept) run.See(each);
               const Tensor vector =
                   nn::utils::parameters_to_vector(s.model->parameters()).detach();
               nn::utils::vector_to_parameters(vector, s.model->parameters());
               Tensor& weight = LinearAt(s.model, 4).weight;
               kept->push_back(vector);
               kept->push_back(weight.data());  // stays over that vector
               weight.set_data(weight.data() * 0.5);
               vector.mul_(0.9);
               kept->back().narrow(0, 1, 2).fill_(0.25);
               run.See(vector);
               run.See(weight);
             }),
      Edited("set_data_with_a_view_that_stays",
             [kept = std::make_shared<std::vector<Tensor>>()](Run& run, Setting& s, int step) {
               Tensor& weight = LinearAt(s.model, 4).weight;
               if (step < 0) kept->clear();
               for (const Tensor& each : *kept) run.See(each);
               const Tensor wide = run.Noise(step + 5, {weight.numel() + 7}) * 0.05;
               weight.set_data(wide.narrow(0, 3, weight.numel()).view_as(weight));
               kept->push_back(wide);
               if (step >= 0) kept->front().mul_(2);
               kept->back().mul_(0.5);
               run.See(weight);
             }),
      Refused(1601, Edited("vector_of_two_parameters_in_one_place",
                           [vector = std::make_shared<Tensor>()](Run& run, Setting& s, int step) {
                             if (step != 1) return;
                             Tensor& weight = LinearAt(s.model, 4).weight;
                             *vector = run.Noise(3, {weight.numel()}) * 0.05;
                             weight.set_data(vector->view_as(weight));
                             Tensor& bias = LinearAt(s.model, 4).bias;
                             bias.set_data(vector->narrow(0, 0, bias.numel()).view_as(bias));
                           })),
      // In one expression with what it was, and beside a graph and views of its old memory, which
      // keep that.
      Edited("set_data_of_what_it_was",
             [](Run& run, Setting& s, int step) {
               Tensor& weight = LinearAt(s.model, 4).weight;
               weight.set_data(weight.detach() * 0.9);
               const Tensor old = weight.detach(), row = weight.data()[3];
               const Tensor x = run.Noise(step + 9, {2, kWidth}).requires_grad_();
               const Tensor loss = Mean(LinearAt(s.model, 4).forward(x));
               weight.set_data(run.Noise(step + 20, weight.sizes()) * 0.05);
               loss.backward();
               run.See(x.grad());
               const NoGradGuard no_grad;
               row.mul_(2);
               run.See(old);
               run.See(weight);
               if (step % 2 == 0) weight.set_data(old);
               run.See(row);
             }),
      Edited("loaded_beside_a_view",
             [](Run& run, Setting& s, int) {
               Tensor& weight = LinearAt(s.model, 0).weight;
               const Tensor row = weight.detach()[2];
               std::stringstream file;
               torch::save(s.model, file);
               {
                 const NoGradGuard no_grad;
                 weight.mul_(0.5);
               }
               torch::load(s.model, file);
               run.See(row);
               const NoGradGuard no_grad;
               row.fill_(0.25);
               run.See(weight);
             }),
      // Averages are evaluated in the place of the weights.
      Edited(
          "set_data_there_and_back",
          [](Run& run, Setting& s, int step) {
            std::vector<Tensor> own;
            for (Tensor& parameter : s.model->parameters()) {
              own.push_back(parameter.data());
              parameter.set_data(run.Noise(step + 40, parameter.sizes()) * 0.05);
            }
            {
              const NoGradGuard no_grad;
              run.See(Loss(run, s.model, step + 60));
            }
            size_t i = 0;
            for (Tensor& parameter : s.model->parameters()) parameter.set_data(own[i++]);
            run.See(*s.model);
          },
          /*sgd=*/false),
      Edited("set_data",
             [](Run& run, Setting& s, int step) {
               if (step == 1)
                 LinearAt(s.model, 0).weight.set_data(run.Noise(3, {kInner, kWidth}) * 0.05);
             }),
      Refused(1601, Edited("set_data_of_another_shape",
                           [](Run& run, Setting& s, int step) {
                             if (step == 1)
                               LinearAt(s.model, 4).weight.set_data(run.Noise(3, {7, kWidth}));
                           })),
      Edited("data_assigned",
             [](Run& run, Setting& s, int step) {
               if (step == 1) LinearAt(s.model, 0).weight.data() = run.Noise(3, {kInner, kWidth});
             }),
      Edited("weights_shared_after_attaching",
             [](Run&, Setting& s, int step) {
               if (step == 1)
                 LinearAt(s.model, 0).bias =
                     torch::zeros({kInner}, LinearAt(s.model, 0).bias.options()).requires_grad_();
             }),
      Edited("saved_to_a_stream", [](Run& run, Setting& s, int) { SeeSaved(run, s); }),
      // What a thread does that leaves signals to another one.
      Edited("pointers_while_all_signals_are_blocked",
             [](Run& run, Setting& s, int) {
               sigset_t all, before;
               sigfillset(&all);
               ::pthread_sigmask(SIG_BLOCK, &all, &before);
               SeeSaved(run, s);
               ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
             }),
      Edited(
          "saved_to_a_file_and_loaded",
          [](Run& run, Setting& s, int step) {
            const std::string path = run.options().nvme_path + "/model.pt";
            if (step == 0) torch::save(s.model, path);
            if (step == 2) torch::load(s.model, path);
          },
          false),
      Edited("loaded_from_a_fresh_model",
             [](Run& run, Setting& s, int step) {
               if (step != 1) return;
               torch::manual_seed(99);
               nn::Sequential other = run.Cast(nn::Sequential(
                   nn::Linear(kWidth, kInner), nn::Tanh(), nn::Linear(kInner, kWidth), nn::GELU(),
                   nn::Linear(kWidth, kWidth)));
               std::stringstream file;
               torch::save(other, file);
               torch::load(s.model, file);
             }),
      Edited("parameters_saved_as_tensors",
             [](Run& run, Setting& s, int step) {
               std::stringstream file;
               torch::save(s.model->parameters(), file);
               std::vector<Tensor> tensors;
               torch::load(tensors, file);
               for (const Tensor& tensor : tensors) run.See(tensor);
               const std::vector<char> pickled = torch::pickle_save(LinearAt(s.model, 4).weight);
               run.See(torch::pickle_load(pickled).toTensor());
             }),
      Edited("archive_by_hand",
             [](Run& run, Setting& s, int step) {
               torch::serialize::OutputArchive out;
               s.model->save(out);
               out.write("step", torch::tensor(step));
               std::ostringstream bytes;
               out.save_to(bytes);
               std::istringstream source(bytes.str());
               torch::serialize::InputArchive in;
               in.load_from(source);
               nn::Sequential copy = Perceptron(run);
               copy->load(in);
               run.See(*copy);
             }),
      Edited(
          "gathered",
          [](Run& run, Setting& s, int) {
            for (const Tensor& p : s.model->parameters()) {
              run.See(s.engine->Gather(p));
              run.See(s.engine->Gather(p, "master"));
              run.See(s.engine->Gather(p, "exp_avg"));
            }
          },
          false),
      Edited("weights_saved_and_loaded_by_the_engine",
             [](Run& run, Setting& s, int step) {
               const std::string folder = run.options().nvme_path + "/weights";
               if (step == 0) s.engine->SaveWeights(folder);
               if (step == 2) s.engine->LoadWeights(folder);
             }),
      {"parameters_change_places",
       [](Run& run) {
         auto model = Squares(run);
         auto engine = run.Open();
         auto optimizer = engine->AdamW(*model, optim::AdamWOptions(1e-2));
         std::vector<Tensor> w;
         for (const size_t at : {0, 2, 4}) w.push_back(LinearAt(model, at).weight);
         const auto train = [&](int step) { TrainStep(run, model, *optimizer, step); };
         train(0);
         Tensor first = w[0].data();
         w[0].set_data(w[1].data());
         run.See(w[0]);
         w[1].set_data(first);
         first.mul_(0.5);
         run.See(w[1]);
         train(1);
         run.See(first);
         first = w[0].data();  // in a circle of three
         w[0].set_data(w[1].data());
         w[1].set_data(w[2].data());
         w[2].set_data(first);
         train(2);
         {
           const NoGradGuard no_grad;
           first = w[0].detach();
           w[0].set_(w[2]);
           w[2].set_(first.storage(), 0, first.sizes(), first.strides());
         }
         train(3);
         w[0].set_data(w[1].data());  // and away from there again
         w[1].set_data(run.Noise(1, w[1].sizes()) * 0.05);
         train(4);
         run.See(*model);
       }},
      {"two_parameters_in_one_memory",
       [](Run& run) {
         auto model = Squares(run);
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.1));
         TrainStep(run, model, *optimizer, 0);
         const NoGradGuard no_grad;
         LinearAt(model, 0).weight.set_(LinearAt(model, 2).weight);
         const at::AutoGradMode grad(true);
         TrainStep(run, model, *optimizer, 1);
       },
       1601},
      {"storages_given_by_set",
       [](Run& run) {
         auto model = Squares(run);
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.1));
         for (int step = 0; step < 3; ++step) {
           TrainStep(run, model, *optimizer, step);
           const NoGradGuard no_grad;
           Tensor& weight = LinearAt(model, 0).weight;
           Tensor values = run.Noise(step, weight.sizes()) * 0.05;
           weight.set_(values.storage(), 0, values.sizes(), values.strides());
           LinearAt(model, 2).bias.set_((run.Noise(step, {kWidth}) * 0.05).storage());
           values = run.Noise(9, weight.sizes()) * 0.05;
           LinearAt(model, 4).weight.set_(values);
           values.mul_(0.5);  // is the parameter's memory
         }
         run.See(*model);
       }},
      {"edited_before_attaching",
       [](Run& run) {
         auto model = Perceptron(run);
         {
           const NoGradGuard no_grad;
           for (Tensor& p : model->parameters()) p.mul_(0.5);
           LinearAt(model, 4).weight.set_data(run.Noise(1, {kWidth, kWidth}) * 0.05);
         }
         std::vector<Tensor> aliases;
         for (const Tensor& p : model->parameters()) aliases.push_back(p.detach());
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.1));
         Train(run, model, *optimizer, 0, 2);
         for (const Tensor& alias : aliases) run.See(alias);
         for (const Tensor& alias : aliases) alias.mul_(0.9);
         Train(run, model, *optimizer, 2, 4);
         run.See(*model);
       }},
      {"pointer_taken_while_another_thread_reads",
       [](Run& run) {
         auto model = Perceptron(run);
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.1));
         Train(run, model, *optimizer, 0, 2);
         const Tensor weight = LinearAt(model, 0).weight.detach();
         const Tensor rows = run.Noise(5, {200, kWidth});
         void* const before = weight.data_ptr();
         void* taken = before;
         std::atomic<bool> is_done = false;
         std::thread reader([&] {
           for (int i = 0; i < 20; ++i) torch::mm(rows, weight.t());
           is_done = true;
         });
         while (!is_done && taken == before) taken = weight.data_ptr();
         reader.join();
         // The other weights take what room there is.
         run.See(Loss(run, model, 2));
         run.See(torch::from_blob(taken, weight.sizes(), weight.options()).clone());
         Train(run, model, *optimizer, 2, 3);
         run.See(*model);
       }},
      {"pointers_taken_before_attaching",
       [](Run& run) {
         auto model = Perceptron(run);
         // As a raw pointer is used: outside of the weight's own tensor.
         const auto over = [](const Tensor& weight) {
           return at::from_blob(weight.data_ptr(), weight.sizes(), weight.options());
         };
         const Tensor first = over(LinearAt(model, 0).weight.detach());
         std::stringstream file;
         torch::save(LinearAt(model, 2).weight.detach() * 0.5, file);
         torch::serialize::InputArchive archive;
         archive.load_from(file);
         archive.read("0", LinearAt(model, 2).weight);
         const Tensor read = over(LinearAt(model, 2).weight.detach());
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.1).momentum(0.9));
         for (uint64_t batch = 0; batch < 3; ++batch) {
           TrainStep(run, model, *optimizer, batch);
           run.See(first);
           run.See(read);
           first.view(-1)[0].zero_();
           read.select(0, 5).mul_(0.5);
         }
         run.See(*model);
       }},
      {"vector_assigned_before_attaching",
       [](Run& run) {
         auto model = Perceptron(run);
         Tensor all = nn::utils::parameters_to_vector(model->parameters()).detach();
         nn::utils::vector_to_parameters(all, model->parameters());
         auto engine = run.Open();
         auto optimizer = engine->SGD(*model, optim::SGDOptions(0.1));
         Train(run, model, *optimizer, 0, 2);
         run.See(*model);
       },
       1601},
  };
}

}  // namespace

Programs EditPrograms() { return Edits(); }

}  // namespace offload::battery
