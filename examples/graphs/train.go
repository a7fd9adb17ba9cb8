// Train a graph as one of several workers: go run train.go URL MODEL.onnx DATA.json RUN RANK WORKERS STEPS
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"
	"time"
)

type object = map[string]any

const micro = "/graphs/RUN?from=parameters:RUN.p.*&into=gradients:RUN.g.*&outputs=loss&weight=32&step=%d&contributor=rank%d"
const adam = "/ops/AdamWOptimizer?reduce=mean&timeout=5&from=weights:RUN.p.*&from=gradients:RUN.g.*@%d&from=momentums_1:RUN.m.*&from=momentums_2:RUN.v.*" +
	"&set=updated_weights:RUN.p.*&set=updated_momentums_1:RUN.m.*&set=updated_momentums_2:RUN.v.*"

// call sends a request until it is done. With its key it counts once, however often it is sent.
func call(method, path, key, kind string, body []byte) (answer object) {
	for told := (time.Time{}); ; time.Sleep(100 * time.Millisecond) {
		request, _ := http.NewRequest(method, os.Args[1]+"/v1"+strings.ReplaceAll(path, "RUN", os.Args[4]), bytes.NewReader(body))
		request.Header = http.Header{"Idempotency-Key": {os.Args[4] + key}, "Content-Type": {kind}}
		response, err := http.DefaultClient.Do(request)
		if answer = nil; err == nil {
			err = json.NewDecoder(response.Body).Decode(&answer)
			status := response.StatusCode
			if status >= 300 {
				err = fmt.Errorf("%s: %s: %v", os.Args[1], response.Status, answer["detail"])
			}
			if err == nil {
				return answer
			} else if status/100 == 4 && status != 429 && answer["code"] != "step_open" {
				log.Fatalln(err)
			}
		}
		if time.Since(told) > time.Minute {
			told = time.Now()
			log.Println(err) // the server is away or busy, or other workers are missing
		}
	}
}

func text(value any) []byte { body, _ := json.Marshal(value); return body }

func main() {
	var rank, workers, steps, done int
	fmt.Sscan(strings.Join(os.Args[5:], " "), &rank, &workers, &steps)
	model, _ := os.ReadFile(os.Args[2])
	data, _ := os.ReadFile(os.Args[3])
	rows, put := map[string][]any{}, "/graphs/RUN?loss=SoftmaxCrossEntropyLoss&set=parameters:RUN.p.*"
	json.Unmarshal(data, &rows)
	ranks := make([]string, workers)
	for other := range ranks {
		ranks[other] = fmt.Sprint("rank", other)
	}
	for name, parameter := range call("PUT", put, ":put", "application/onnx", model)["parameters"].(object) {
		for kind, rules := range map[string]object{"g": {"quorum": workers, "contributors": ranks}, "m": {}, "v": {}} {
			rules["shape"] = parameter.(object)["shape"]
			call("PUT", "/buffers/RUN."+kind+"."+name, fmt.Sprint(":", workers, kind, name), "application/json", text(rules))
		}
		done = int(call("GET", "/buffers/RUN.p."+name, "", "", nil)["version"].(float64)) - 1 // a step writes it once
	}
	for step := done; step < steps; step++ {
		batch := map[string][]any{}
		for name, all := range rows {
			batch[name] = all[(step*workers+rank)*32%len(all):][:32]
		}
		answer := call("POST", fmt.Sprintf(micro, step, rank), fmt.Sprintf(":%d:%d", step, rank), "application/json", text(batch))
		fmt.Println(step, answer["loss"].(object)["data"])
		call("POST", fmt.Sprintf(adam, step), fmt.Sprintf(":%d", step), "application/json", fmt.Appendf(nil, `{"lr": 0.01, "step": %d}`, step+1))
	}
	os.WriteFile(os.Args[4]+".json", text(call("POST", "/buffers/value?prefix=RUN.p.", "", "", nil)), 0o644)
}
