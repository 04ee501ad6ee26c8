// Answers questions of IAM by an evaluator that is not ours: `node judge.mjs` reads a JSON list of {policy, action, resource, context,
// key} and prints one of {result, errors}. `key` is the policy of a KMS key. Asks nobody; AWS's actions and resources are in its package.
import { readFileSync } from 'node:fs'
import { runSimulation } from '@cloud-copilot/iam-simulate'

const account = '123456789012'
const answers = []
for (const asked of JSON.parse(readFileSync(0, 'utf8'))) {
  const said = await runSimulation(
    {
      request: {
        principal: `arn:aws:sts::${account}:assumed-role/Role/session`,
        action: asked.action,
        resource: { resource: asked.resource, accountId: account },
        contextVariables: asked.context ?? {},
      },
      identityPolicies: [{ name: 'run', policy: asked.policy }],
      serviceControlPolicies: [],
      resourceControlPolicies: [],
      ...(asked.key ? { resourcePolicy: asked.key } : {}),
    },
    {},
  )
  answers.push(said.resultType === 'error' ? { result: 'error', errors: said.errors } : { result: said.overallResult, errors: null })
}
console.log(JSON.stringify(answers))
