// Programs of the battery about parameters that do not lie row by row in memory: channels_last,
// transposed and permuted ones.

#include <ATen/Functions.h>
#include <torch/optim.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <sstream>
#include <utility>

#include "tests/battery_torch.h"

namespace offload::battery {
namespace {

using torch::NoGradGuard;
using Optimizer = std::unique_ptr<optim::Optimizer>;

Optimizer MakeSgd(Engine& engine, nn::Module& model) {
  return engine.SGD(model, optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
}
Optimizer MakeAdamW(Engine& engine, nn::Module& model) {
  return engine.AdamW(model, optim::AdamWOptions(1e-2).amsgrad(true));
}

// ---- Convolutions ------------------------------------------------------------------------------

constexpr at::MemoryFormat kChannelsLast = at::MemoryFormat::ChannelsLast;

void LayOut(nn::Module& model, at::MemoryFormat format) {
  for (Tensor& parameter : model.parameters()) {
    if (parameter.dim() == 4) parameter.set_data(parameter.detach().clone(format));
  }
}

// Ordinary, with groups, of one element per channel, transposed; one of more than an extent.
nn::Sequential Convolutions(const Run& run, at::MemoryFormat format = kChannelsLast) {
  torch::manual_seed(31);
  nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 64, 3).padding(1)), nn::BatchNorm2d(64),
                       nn::ReLU(), nn::Conv2d(nn::Conv2dOptions(64, 64, 3).groups(64).padding(1)),
                       nn::Conv2d(nn::Conv2dOptions(64, 512, 3).stride(2)),
                       nn::Conv2d(nn::Conv2dOptions(512, 16, 1)),
                       nn::ConvTranspose2d(nn::ConvTranspose2dOptions(16, 3, 3).stride(2)));
  LayOut(*model, format);
  return run.Cast(model);
}

Tensor Picture(const Run& run, uint64_t seed) {
  return run.Noise(seed, {2, 3, 9, 9}).contiguous(kChannelsLast);
}

void TrainPictures(Run& run, nn::Sequential& model, optim::Optimizer& optimizer, uint64_t begin,
                   uint64_t end) {
  for (uint64_t batch = begin; batch < end; ++batch) {
    for (uint64_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
      const Tensor loss = Mean(model->forward(Picture(run, 2 * batch + micro_batch)));
      loss.backward();
      run.See(loss);
    }
    run.See(nn::utils::clip_grad_norm_(model->parameters(), 0.1));
    run.SeeGradients(*model);
    optimizer.step();
    optimizer.zero_grad();
  }
}

Program OfConvolutions(std::string name, Optimizer (*make)(Engine&, nn::Module&)) {
  return {std::move(name), [make](Run& run) {
            auto model = Convolutions(run);
            auto engine = run.Open();
            auto optimizer = make(*engine, *model);
            TrainPictures(run, model, *optimizer, 0, 3);
            for (const Tensor& parameter : model->parameters()) {
              run.See(static_cast<double>(parameter.is_contiguous(kChannelsLast)));
              run.See(engine->Gather(parameter));
              run.See(engine->Gather(parameter, "master"));
            }
            run.See(*model);
          }};
}

// ---- Matrices ----------------------------------------------------------------------------------

// x · weight, of a matrix that lies column by column and one whose dimensions are permuted.
struct Net : nn::Module {
  Net(const Run& run, bool transposed = true) {
    Tensor matrix = run.Noise(41, {kInner, kWidth}) * 0.03, cube = run.Noise(42, {32, 5, kInner});
    matrix = transposed ? matrix.t() : matrix.t().contiguous();
    first = register_parameter("first", matrix);
    second = register_parameter("second", (cube * 0.03).permute({2, 0, 1}));
    scale = register_parameter("scale", run.Noise(43, {8, 4}).t());
  }
  Tensor Loss(const Run& run, uint64_t batch) const {
    const Tensor x = run.Noise(batch, {6, kWidth});
    return Mean(at::matmul(at::tanh(at::matmul(x, first)), second.flatten(1))) + Mean(scale);
  }
  Tensor first, second, scale;
};

void TrainNet(Run& run, Net& net, optim::Optimizer& optimizer, uint64_t begin, uint64_t end) {
  for (uint64_t batch = begin; batch < end; ++batch) {
    const Tensor loss = net.Loss(run, batch);
    loss.backward();
    run.See(loss);
    run.See(nn::utils::clip_grad_norm_(net.parameters(), 0.05));
    run.See(net.first.grad().norm());
    run.See(net.second.grad().permute({1, 2, 0}).norm());
    optimizer.step();
    optimizer.zero_grad();
  }
}

Program OfNet(std::string name, std::function<Optimizer(Engine&, nn::Module&)> make) {
  return {std::move(name), [make](Run& run) {
            Net net(run);
            auto engine = run.Open();
            auto optimizer = make(*engine, net);
            TrainNet(run, net, *optimizer, 0, 4);
            for (const Tensor& parameter : net.parameters()) {
              run.See(static_cast<double>(parameter.is_contiguous()));
              run.See(engine->Gather(parameter));
            }
            run.See(net);
          }};
}

Programs Training() {
  return {
      OfConvolutions("channels_last_sgd", &MakeSgd),
      OfConvolutions("channels_last_adamw", &MakeAdamW),
      OfNet("transposed_sgd", &MakeSgd),
      OfNet("transposed_adamw", &MakeAdamW),
      OfNet("transposed_fused_adamw",
            [](Engine& engine, nn::Module& model) {
              return engine.AdamW(model, optim::AdamWOptions(1e-2), AdamWFlavour::kFused);
            }),
      OfNet(
          "transposed_lamb",
          [](Engine& engine, nn::Module& model) { return engine.LAMB(model, LAMBOptions(1e-2)); }),
      {"transposed_with_assigned_gradients",
       [](Run& run) {
         Net net(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, net);
         for (uint64_t step = 0; step < 3; ++step) {
           net.first.mutable_grad() = run.Noise(step, {kWidth, kInner});
           net.second.mutable_grad() = run.Noise(step, {32, 5, kInner}).permute({2, 0, 1});
           optimizer->step();
           run.See(net.first);
           run.See(net.second);
         }
       }},
  };
}

// ---- What else is done with them ---------------------------------------------------------------

std::string Folder(const Run& run, const std::string& name) {
  return run.options().nvme_path + "/" + name;
}

Programs Lives() {
  return {
      {"strided_weights_through_files",
       [](Run& run) {
         Net net(run), rows(run, /*transposed=*/false);
         rows.to(run.dtype());
         auto engine = run.Open();
         auto optimizer = MakeAdamW(*engine, net);
         TrainNet(run, net, *optimizer, 0, 2);
         engine->SaveWeights(Folder(run, "saved"));
         LoadWeights(rows, Folder(run, "saved"));
         run.See(rows);
         TrainNet(run, net, *optimizer, 2, 4);
         engine->LoadWeights(Folder(run, "saved"));
         run.See(net);
         TrainNet(run, net, *optimizer, 4, 6);
         SaveWeights(rows, Folder(run, "rows"));
         engine->LoadWeights(Folder(run, "rows"));
         run.See(net);
       }},
      {"strided_weights_begin_with_a_file",
       [](Run& run) {
         Net first(run);
         {
           const NoGradGuard no_grad;
           first.first.mul_(0.5);
         }
         SaveWeights(first, Folder(run, "first"));
         Net net(run);
         auto engine = run.Open();
         engine->SetInitialWeights(Folder(run, "first"));
         auto optimizer = MakeSgd(*engine, net);
         run.See(net);
         TrainNet(run, net, *optimizer, 0, 2);
         run.See(net);
       }},
      {"strided_weights_through_torch_save",
       [](Run& run) {
         auto model = Convolutions(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         TrainPictures(run, model, *optimizer, 0, 1);
         std::stringstream file;
         torch::save(model, file);
         TrainPictures(run, model, *optimizer, 1, 2);
         torch::load(model, file);
         run.See(*model);
         TrainPictures(run, model, *optimizer, 2, 3);
       }},
      {"strided_weights_through_pointers",
       [](Run& run) {
         Net net(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, net);
         TrainNet(run, net, *optimizer, 0, 1);
         auto* const bytes = static_cast<uint8_t*>(net.first.data_ptr());
         run.See(static_cast<double>(bytes[kInner * net.first.element_size()]));
         bytes[1] ^= 1;
         TrainNet(run, net, *optimizer, 1, 3);
         run.See(net);
       }},
      {"strided_weights_are_edited",
       [](Run& run) {
         Net net(run);
         auto engine = run.Open();
         auto optimizer = MakeAdamW(*engine, net);
         TrainNet(run, net, *optimizer, 0, 1);
         {
           const NoGradGuard no_grad;
           net.first.copy_(run.Noise(7, {kWidth, kInner}));
           net.second.view({kInner, 160}).slice(1, 3, 9).zero_();
           net.scale.t().fill_(0.25);
           net.second.mul_(0.5);
         }
         run.See(net);
         TrainNet(run, net, *optimizer, 1, 3);
         run.See(net);
       }},
      {"strided_job_goes_on",
       [](Run& run) {
         const bool in_memory = IsInMemory();
         auto model = Convolutions(run);
         auto engine = run.Open();
         auto optimizer = MakeAdamW(*engine, *model);
         TrainPictures(run, model, *optimizer, 0, 2);
         if (!in_memory) {
           optimizer.reset();
           engine.reset();
           model = Convolutions(run);
           engine = run.Reopen();
           optimizer = MakeAdamW(*engine, *model);
         }
         TrainPictures(run, model, *optimizer, 2, 4);
         run.See(*model);
       }},
      {"strided_job_goes_on_with_other_strides",
       [](Run& run) {
         auto model = Convolutions(run);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         TrainPictures(run, model, *optimizer, 0, 1);
         optimizer.reset();
         engine.reset();
         model = Convolutions(run, at::MemoryFormat::Contiguous);
         engine = run.Reopen();
         optimizer = MakeSgd(*engine, *model);
         run.See(*model);
       },
       1602},
      {"other_strides_by_set_data",
       [](Run& run) {
         auto model = Convolutions(run, at::MemoryFormat::Contiguous);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, *model);
         LayOut(*model, kChannelsLast);
         TrainPictures(run, model, *optimizer, 0, 1);
       },
       1601},
      {"transposed_tie",
       [](Run& run) {
         nn::Module net;
         Tensor weight = net.register_parameter("weight", run.Noise(1, {200, 200}));
         net.register_parameter("transposed", weight.detach().t(), /*requires_grad=*/false);
         auto engine = run.Open();
         auto optimizer = MakeSgd(*engine, net);
       },
       1601},
  };
}

}  // namespace

Programs StridePrograms() {
  Programs all = Training();
  for (Program& program : Lives()) all.push_back(std::move(program));
  return all;
}

}  // namespace offload::battery
