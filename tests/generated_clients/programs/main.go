// Calls an operator, and another with groups of tensors, fills and takes a buffer, and tells an error by its code.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"gradserve.example/client/gradserve"
)

func numbers(values ...interface{}) gradserve.Numbers {
	return gradserve.Numbers{ArrayOfAny: &values}
}

func tensor(values ...interface{}) gradserve.FloatTensor {
	list := numbers(values...)
	return gradserve.FloatTensor{Numbers: &list}
}

func gradient(values ...interface{}) gradserve.GradientBody {
	dense := tensor(values...)
	return *gradserve.NewGradientBody(gradserve.Gradient{FloatTensor: &dense})
}

func fault(err error) string {
	var answer *gradserve.GenericOpenAPIError
	if !errors.As(err, &answer) {
		return err.Error()
	}
	problem, ok := answer.Model().(gradserve.Problem)
	if !ok {
		return err.Error()
	}
	switch problem.Code {
	case gradserve.SHAPE_MISMATCH:
		return fmt.Sprintf("%s of %s", problem.Code, problem.GetTensor())
	case gradserve.BUSY, gradserve.NOT_READY:
		return "try again"
	default:
		return problem.Detail
	}
}

func check(err error) {
	if err != nil {
		panic(fault(err))
	}
}

func show(name string, tensor *gradserve.FloatTensorAnswer) {
	fmt.Println(append([]interface{}{name}, *tensor.Data.ArrayOfAny...)...)
}

func main() {
	ctx, name := context.Background(), "go"
	configuration := gradserve.NewConfiguration()
	configuration.Servers = gradserve.ServerConfigurations{{URL: os.Getenv("GRADSERVE_URL")}}
	client := gradserve.NewAPIClient(configuration)

	request := gradserve.NewReluGradRequest()
	request.SetDY(tensor(1, 2))
	request.SetX(tensor(0.5, -1))
	answer, _, err := client.OperatorsAPI.ReluGrad(ctx).ReluGradRequest(*request).Execute()
	check(err)
	show("relu", answer.DX.FloatTensorAnswer)

	step := gradserve.NewSGDOptimizerV2Request()
	step.SetLr(tensor(1))
	step.SetWeights(map[string]gradserve.FloatTensor{"fc.bias": tensor(3)})
	step.SetGradients(map[string]gradserve.FloatTensor{"fc.bias": tensor(1)})
	stepped, _, err := client.OperatorsAPI.SGDOptimizerV2(ctx).SGDOptimizerV2Request(*step).Execute()
	check(err)
	show("step", stepped.GetUpdatedWeights()["fc.bias"].FloatTensorAnswer)

	_, _, err = client.BuffersAPI.CreateBuffer(ctx, name).NewBuffer(*gradserve.NewNewBuffer([]int64{2})).Execute()
	check(err)
	for attempt := 0; attempt < 2; attempt++ {
		add := client.BuffersAPI.Accumulate(ctx, name).GradientBody(gradient(1, 2)).IdempotencyKey("go 0")
		receipt, _, err := add.Execute()
		check(err)
		if receipt.Count != 1 {
			panic("a retry counts twice")
		}
	}
	_, _, err = client.BuffersAPI.Accumulate(ctx, name).GradientBody(gradient(3, 4)).Execute()
	check(err)
	receipt, _, err := client.BuffersAPI.Take(ctx, name).MinCount(2).Execute()
	check(err)
	show("take", receipt.Value)

	request.SetX(tensor(1))
	_, _, err = client.OperatorsAPI.ReluGrad(ctx).ReluGradRequest(*request).Execute()
	fmt.Println("error", fault(err))
}
